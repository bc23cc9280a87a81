"""Each line of MUTANTS breaks one decision of the core, and the tests named for it must fail.

    python tests/support/mutants.py [PART OF A PATH ...]

Each mutant is made in a copy of the working tree, and each test file named for it must fail there.
So a test can be deleted as long as this passes: another one sees what it saw. Exit code 1 where a
mutant survives; a sentence where a text is not found exactly once, or a test file does not run, and
then whoever renames it mends the row.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
AT_ONCE = 2
LIMIT_S = 240.0  # of one test file; one that hangs has failed
PASSED, FAILED = 0, 1


@dataclass(frozen=True, slots=True)
class Mutant:
    """file: below elastic/. old: a text that stands there once. tests: below tests/."""

    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    # The sum is one tree, whoever holds which leaves.
    Mutant("reduce/tree.py", "reversed(stack.parts.values())", "stack.parts.values()", "pure/test_tree.py"),
    Mutant("reduce/tree.py", "(rank + 1) * shards // world_size", "(rank + 1) * (shards // world_size)", "pure/test_tree.py"),
    Mutant("reduce/tree.py", "(leaf // 2, leaf == alone)", "((leaf + 1) // 2, leaf == alone)", "pure/test_gradients.py"),
    Mutant("reduce/exchange.py", "if not self._are_halves:", "if not all(len(each) == 1 for each in self._blocks):", "pure/test_exchange.py"),
    Mutant("train/step/buffers.py", "values[i] = values[i].clone()", "pass", "pure/test_buffers.py"),
    # Which samples a step trains.
    Mutant("data/random_keys.py", "ROUNDS = 8", "ROUNDS = 2", "pure/test_order.py"),
    Mutant("data/order.py", '"order", epoch', '"order", 0', "pure/test_order.py"),
    Mutant("data/order.py", "+ self.samples * earlier_draws(of_epoch)", "", "pure/test_loader.py"),
    # A checkpoint is whole, or is none.
    Mutant("checkpoint/commit.py", "if self._limits.is_fenced():", "if False:", "pure/test_checkpoint_commit.py"),
    Mutant("checkpoint/commit.py", "if stored_bytes != payload.size_bytes:", "if False:", "pure/test_checkpoint_commit.py"),
    Mutant("checkpoint/commit.py", "self._check_is_there(record)", "pass", "pure/test_checkpoint_commit.py"),
    Mutant("checkpoint/prune.py", "not at.is_record, name", "at.is_record, name", "pure/test_checkpoint_commit.py"),
    Mutant("checkpoint/prune.py", "if not is_newest():", "if False:", "pure/test_checkpoint_commit.py"),
    Mutant("checkpoint/prune.py", "at.generation < generation and", "", "pure/test_checkpoint_commit.py"),
    Mutant("uploader/fence.py", "if read_ns >= asked_ns:", "if True:", "pure/test_fence.py"),
    Mutant("uploader/fence.py", "words[_NEWEST] <= max(generation, words[_ENTERED])", "words[_NEWEST] <= generation", "pure/test_fence.py"),
    Mutant("uploader/fence.py", "max(words[_NEWEST], self._shown())", "self._shown()", "pure/test_fence.py"),
    # A snapshot is whole, or is none.
    Mutant("snapshot/slots.py", "self._word(slot, _LEASES) == 0 and", "", "pure/test_uploader.py"),
    Mutant("snapshot/slots.py", "seq + 1 if _is_whole(seq) else seq", "seq - 1 if _is_whole(seq) else seq", "pure/test_snapshot_slots.py"),
    Mutant("snapshot/safetensors_header.py", "-elements[name]", "elements[name]", "pure/test_image.py"),
    Mutant("snapshot/image.py", "if first != name and form.size_bytes:", "if False:", "pure/test_image.py"),
    # Who takes part.
    Mutant("rendezvous/failure_detector.py", "counter in (last.counter, NO_HEARTBEAT)", "counter == last.counter", "pure/test_rendezvous_transitions.py"),
    Mutant("rendezvous/failure_detector.py", "is None or not counts else", "is None else", "pure/test_rendezvous.py"),
    Mutant("system/silence.py", "min(elapsed_s, limit_s / POLLS_WITHIN_LIMIT)", "elapsed_s", "pure/test_hang_detector.py"),
    Mutant("rendezvous/membership.py", "*(waiting[name] for name in previous),\n", "", "pure/test_rendezvous_transitions.py"),
    Mutant("rendezvous/membership.py", "workers + node.nproc <= policy", "workers <= policy", "pure/test_rendezvous_transitions.py"),
    Mutant("rendezvous/transitions.py", "0 if step > group.high_step else group.restarts", "group.restarts", "pure/test_rendezvous_transitions.py"),
    Mutant("rendezvous/transitions.py", "max(0, group.restarts - 1)", "group.restarts", "pure/test_rendezvous_transitions.py"),
    Mutant("rendezvous/transitions.py", "(is_shared and others)", "is_shared", "pure/test_rendezvous_transitions.py"),
    Mutant("rendezvous/transitions.py", "if group.member_ids - set(reported_done.done):", "if False:", "pure/test_rendezvous.py"),
    # What an agent decides.
    Mutant("agent/decide.py", "iter(by_itself + failures)", "iter(failures)", "pure/test_decide.py"),
    Mutant("agent/decide.py", "rule.action in _REPORTS and observation.leaving", "False", "pure/test_decide.py"),
    Mutant("agent/decide.py", "self.code == errors.EXIT_COMPLETE and self.open_step is not None", "False", "pure/test_decide.py"),
    Mutant("agent/hang_detector.py", "return WAITING_FACTOR * usual_s", "return usual_s", "pure/test_hang_detector.py"),
    # Ranks agree on a state before it counts.
    Mutant("proof/agreement.py", "if all(ballot & _KEPT for", "if any(ballot & _KEPT for", "pure/test_agreement.py"),
    Mutant("proof/agreement.py", "        undo()\n", "", "pure/test_agreement.py"),
    Mutant("proof/agreement.py", "self.snapshotting.discard_newer(self.step)", "pass", "pure/test_agreement.py"),
    # Two executions, compared.
    Mutant("proof/evidence.py", "for each in found for name in each.entries)", "for each in found[:1] for name in each.entries)", "pure/test_proof.py"),
    Mutant("proof/verdict.py", "Verdict.HIDDEN if later[0] == later[1]", "Verdict.HIDDEN if False", "pure/test_proof.py"),
    Mutant("proof/evidence.py", "if name not in unsteady and all(", "if all(", "pure/test_proof.py"),
    Mutant("proof/step_again.py", "max(of_ranks, key", "min(of_ranks, key", "pure/test_proof.py"),
    Mutant("proof/rehearsals.py", "else 2 * before[-1]", "else before[-1] + 1", "pure/test_proof.py"),
    Mutant("proof/replay.py", "and line.generation > ended", "", "pure/test_replay.py"),
    Mutant("proof/replay.py", "and last.chain == chain[:CHAIN_DIGITS]", "", "pure/test_replay.py"),
    Mutant("proof/verdict.py", "self.again == self.owners_second == self.auditors_second", "self.again == self.auditors_second", "pure/test_audit_verdict.py"),
    # Which state training goes on from.
    Mutant("train/state/candidates.py", "each.step > known.agreed", "each.step >= known.agreed", "pure/test_restore.py"),
    Mutant("train/state/candidates.py", "(-each.step, each.is_stored)", "(-each.step, not each.is_stored)", "pure/test_restore.py"),
    Mutant("train/state/candidates.py", "if newest < committed_step and not is_there:", "if False:", "pure/test_restore.py"),
    Mutant("train/loop/schedule.py", "if current is not None and wanted <= current", "if current is not None and 0 <= current", "pure/test_schedule.py"),
    # What a step is, and what it refuses.
    Mutant("train/step/contract.py", "if versions != self._versions:", "if False:", "pure/test_step_refusals.py"),
    Mutant("train/step/contract.py", "not self.parts.has_same_values()", "False", "pure/test_step_refusals.py"),
    Mutant("train/step/contract.py", "if now != self._flags:", "if False:", "pure/test_step_refusals.py"),
    Mutant("train/step/contract.py", "        if self._is_in_function:", "        if False:", "pure/test_step_refusals.py"),
    Mutant("train/step/contract.py", "if list(map(_TRAINING, self._modules)) != self._flags:", "if False:", "pure/test_exact_recipes.py"),
    Mutant("train/step/sums.py", "or found.has_graph > agreed.has_graph", "", "pure/test_step_refusals.py"),
    Mutant("train/step/parts.py", "if not buffers.sums.have_same_integers(signs):", "if False:", "pure/test_buffers.py"),
    Mutant("train/step/step.py", "if self.has_line:", "if False:", "pure/test_step_refusals.py"),
    Mutant("train/state/structure.py", "len(now) != len(known) or not all(map(operator.is_, now, known))", "False", "pure/test_exact_recipes.py"),
    Mutant("data/loader.py", '"sample", epoch, stream', '"sample", stream', "pure/test_loader.py"),
    Mutant("train/evaluation.py", "torch.full((sum(sizes),), -0.0", "torch.full((sum(sizes),), 0.0", "pure/test_evaluation.py"),
    Mutant("train/evaluation.py", "kept.put_back()", "pass", "pure/test_evaluation.py"),
    Mutant("train/evaluation.py", "if samples != own_samples:", "if False:", "pure/test_evaluation.py"),
    # A state comes back as it was.
    Mutant("train/state/restore.py", "and checksum.of_image(found) == part.checksum:", ":", "pure/test_restore.py"),
    Mutant("train/state/built.py", "            if before != now:", "            if False:", "pure/test_load.py"),
    Mutant("train/state/built.py", "if there.frozen == built.frozen:", "if False:", "pure/test_exact_recipes.py"),
    Mutant("train/state/values.py", "(former := places.setdefault(id(value), place)) != place", "(former := places.setdefault(id(value), place)) is None", "pure/test_state.py"),
    Mutant("proof/agreement.py", "step == 0 or is_repeated(known, step)", "step == 0", "pure/test_agreement.py"),
)  # fmt: skip


def survives(mutant: Mutant) -> list[str]:
    """The test files that should see the mutant, and do not. Raises ValueError, SyntaxError."""
    with tempfile.TemporaryDirectory() as folder:
        for name in ("elastic", "tests", "recipes", "benchmarks", "pyproject.toml"):
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, Path(folder, name))
        path = Path(folder, "elastic", mutant.file)
        text = path.read_text()
        if (count := text.count(mutant.old)) != 1:
            raise ValueError(f"{mutant.file}: expected {mutant.old!r} once, found it {count} times")
        path.write_text(text.replace(mutant.old, mutant.new))
        compile(path.read_text(), mutant.file, "exec")
        return [name for name in mutant.tests.split() if not fails(folder, f"tests/{name}")]


def fails(root: str, file: str) -> bool:
    """Raises ValueError where the tests do not run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", file]
    # The copy comes before the checkout that the environment has installed.
    env = os.environ | {"PYTHONPATH": root, "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            command, cwd=root, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode not in (PASSED, FAILED):
        raise ValueError(f"{file} does not run:\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == FAILED


def main() -> int:
    parts, survived = sys.argv[1:], 0
    mutants = [
        each for each in MUTANTS if not parts or any(part in f"{each.file} {each.tests}" for part in parts)
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for each, blind in zip(mutants, pool.map(survives, mutants), strict=True):
            survived += bool(blind)
            what = f"survives {', '.join(blind)}" if blind else "is seen"
            print(f"{each.file}: {each.old.strip()!r} -> {each.new.strip()!r} {what}", flush=True)
    print(f"{len(mutants)} mutants, {survived} survive")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
