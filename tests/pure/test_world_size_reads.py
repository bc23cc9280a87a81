"""What asks for the number of workers is found in a recipe's text; what only shows it is not."""

import sys
from types import SimpleNamespace

import pytest

from elastic.train import recipe_text, world_size_reads


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("lr = 0.1 * run.world_size", "run.world_size"),
        ("lr = 0.1 * self.run.world_size", "self.run.world_size"),
        ("lr = 0.1 * dist.get_world_size()", "dist.get_world_size()"),
        ("lr = 0.1 * torch.distributed.get_world_size()", "torch.distributed.get_world_size()"),
        ("lr = 0.1 * get_world_size()", "get_world_size()"),
        ("lr = 0.1 * int(os.environ['WORLD_SIZE'])", "'WORLD_SIZE'"),
        ("lr = 0.1 * int(os.getenv('LOCAL_WORLD_SIZE', 1))", "'LOCAL_WORLD_SIZE'"),
        ("dist.all_reduce(loss)", "dist.all_reduce()"),
        ("dist.reduce(loss, 0)", "dist.reduce()"),
        ("dist.all_gather_object(parts, part)", "dist.all_gather_object()"),
        ("lr = 0.1 * torch.cuda.device_count()", "torch.cuda.device_count()"),
        ("lr = eval(os.path.expandvars('0.1 * ${WORLD_SIZE}'))", "'0.1 * ${WORLD_SIZE}'"),
        ("lr = math.log(1 + run.world_size)", "run.world_size"),
        ("ours = elastic.start(seed=0); lr = ours.world_size", "ours.world_size"),
        ("lr = 0.1 * getattr(run, 'world_size')", "getattr(run, 'world_size')"),
        ("lr = 0.1 * len(dist.get_process_group_ranks(None))", "dist.get_process_group_ranks()"),
        ("lr = 0.1 * {k.lower(): v for k, v in os.environ.items()}['world_size']", "'world_size'"),
        ("env = {k.lower(): v for k, v in os.environ.items()}; lr = env.get('world_size')", "'world_size'"),
        ("lr = 0.1 * int(os.environ['SLURM_NTASKS'])", "'SLURM_NTASKS'"),
        ("n = len(os.environ['CUDA_VISIBLE_DEVICES'].split(','))", "os.environ['CUDA_VISIBLE_DEVICES']"),
        ("n = len(os.getenv('CUDA_VISIBLE_DEVICES', '').split(','))", "os.getenv()"),
        ("n = len(subprocess.check_output(['nvidia-smi', '-L']).splitlines())", "subprocess.check_output()"),
        ("n = int(os.popen('nvidia-smi -L | wc -l').read())", "os.popen()"),
        ("sampler = DistributedSampler(validation)", "DistributedSampler()"),
        ("lr = 0.1 * (dist.get_rank() + 1)", "dist.get_rank() + 1"),
        ("lr = 0.1 * (1 + run.rank)", "1 + run.rank"),
        ("lr = 0.1 * 2 ** int(os.environ['LOCAL_RANK'])", "2 ** int(os.environ['LOCAL_RANK'])"),
        ("rank = dist.get_rank(); np.random.seed(seed + rank)", "np.random.seed()"),
        ("own = indices[int(os.environ.get('RANK', 0))::2]", "indices[int(os.environ.get('RANK', 0))::2]"),
        ("random.seed(run.rank)", "random.seed()"),
        ("own = Subset(val, range(run.rank, len(val), 2))", "range()"),
        ("draw = np.random.default_rng([7, dist.get_rank()])", "np.random.default_rng()"),
    ],
)
def test_what_asks_for_the_number_of_workers_is_found_with_its_line(line, found):
    assert world_size_reads.reads_of(f"import elastic\n{line}\n".encode()) == [(2, found)]


@pytest.mark.parametrize(
    "line",
    [
        "print('workers', run.world_size)",
        "run.print(dist.get_world_size())",
        "step.log(workers=run.world_size)",
        "self.logger.log(10, run.world_size)",
        "name = f'{run.world_size} workers'",
        "logger.info('%d workers', run.world_size)",
        "args.world_size = 3",
        "total = functools.reduce(add, [1, 2])  # the world_size does not matter",
        "near = table.gather(0, index)  # run.world_size",
        "def broken(:  # run.world_size",
        "device = torch.device('cuda', int(os.environ['LOCAL_RANK']))",
        "torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())",
        "is_chief = dist.get_rank() == 0 or run.rank == 0",
        "name = 'of rank ' + str(run.rank)",
        "os.environ['CUDA_VISIBLE_DEVICES'] = '0'  # run.rank",
        "world = config['world_size']",
        "os.environ['OMP_NUM_THREADS'] = '1'; config = {'world_size': 3}",
        "print(subprocess.check_output(['nvidia-smi', '-L']))",
        "path = folder / f'{run.rank + 1}.txt'",
        "rank = matrix.rank(); scale = 1 + rank  # run.rank",
    ],
)
def test_what_only_shows_the_number_or_is_another_is_left_out(line):
    assert world_size_reads.reads_of(f"import elastic\n{line}\n".encode()) == []


def test_modules_beside_the_script_are_read_and_installed_ones_are_not(tmp_path, monkeypatch):
    """The rate is computed in a file of the recipe's own. A library in a virtual environment beside
    the script asks for the number of workers rightly.
    """
    (tmp_path / "lib" / "site-packages").mkdir(parents=True)
    texts = {
        "train.py": "import rates, lib",
        "rates.py": "\n\nrate = 0.1 * dist.get_world_size()",
        "lib/site-packages/thing.py": "n = dist.get_world_size()",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        module = SimpleNamespace(__file__=str(tmp_path / name))
        monkeypatch.setitem(sys.modules, "__main__" if name == "train.py" else f"of_test_{name}", module)
    assert recipe_text.places_in_recipe(world_size_reads.reads_of) == ["rates.py:3 (dist.get_world_size())"]
