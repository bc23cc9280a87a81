"""Objects of Python's, NumPy's and torch's own classes that a loop changes, kind by kind.

Each loop does so in every step, as people write it, and a process that restarts has them as the
script makes them.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.train.words import hash_of_key, plain_text
from tests.pure import test_loop_memory as loops

LINES = "''.join(f'{n}\\n' for n in range(99))"
# By what a loop does in each step: what the script makes before. The name that is told is `it`.
REFUSED = {
    "next(it)": {
        "bytes": "it = iter(bytes(99))",
        "a bytearray": "it = iter(bytearray(99))",
        "an array": "import array; it = iter(array.array('b', bytes(99)))",
        "a memoryview": "it = iter(memoryview(bytes(99)))",
        "a deque": "it = iter(collections.deque(range(99)))",
        "an OrderedDict": "it = iter(collections.OrderedDict.fromkeys(range(99)))",
        "a dict, backwards": "it = reversed(dict.fromkeys(range(99)))",
        "an ndarray": "it = iter(np.arange(99))",
        "a flat ndarray": "it = np.arange(99).flat",
        "nditer": "it = np.nditer(np.arange(99))",
        "ndenumerate": "it = np.ndenumerate(np.arange(99))",
        "ndindex": "it = np.ndindex(99)",
        "a sequence of the recipe's": "class S:\n    def __getitem__(self, n):\n        return n\nit = iter(S())",
        "map": "it = map(abs, range(99))",
        "zip": "it = zip(range(99), range(99))",
        "tee": "it, other = itertools.tee(range(99))",
        "calls": "it = iter([*range(99)].pop, None)",
        "finditer": "import re; it = re.finditer('a', 99 * 'a')",
        "struct": "import struct; it = struct.iter_unpack('B', bytes(99))",
        "csv": f"import csv; it = csv.reader({LINES}.split())",
        "csv of dicts": f"import csv; it = csv.DictReader({LINES}.split())",
    },
    "it.search()": {"a scanner": "import re; it = re.compile('a').scanner(99 * 'a')"},
    "it.send(None)": {
        "a coroutine": "import types\n@types.coroutine\ndef f():\n    while True:\n        yield\nasync def g():\n    await f()\nit = g()"
    },
    "it.random_raw()": {"bits": "it = np.random.PCG64(0)"},
    "it.spawn(1)": {"a seed sequence": "it = np.random.SeedSequence(0)"},
    "it.random()": {"a subclass of Random": "class R(random.Random):\n    pass\nit = R(0)"},
    "it[0] = step.number": {
        "a storage": "it = torch.zeros(4).untyped_storage()",
        "a typed storage": "it = torch.zeros(4).storage()",
    },
    "it[step.number] = np.ma.masked": {"a masked array": "it = np.ma.array(np.arange(99), mask=False)"},
    "it.read(1)": {"a memory map's place": "import mmap; it = mmap.mmap(-1, 99)"},
}
NAMED = {
    "it.update(b'x')": {
        f"hashlib.{name}": f"import hashlib; it = hashlib.{name}()"
        for name in ("sha256", "md5", "blake2b", "sha3_256", "shake_128")
    }
    | {"hmac": "import hmac; it = hmac.new(b'k', digestmod='sha256')"},
    "it.readline()": {
        "a file of lines": f"import tempfile; it = tempfile.TemporaryFile('w+'); it.write({LINES}); it.seek(0)",
        "a file of lines for reading": f"import pathlib, tempfile; path = tempfile.mkstemp()[1]; pathlib.Path(path).write_text({LINES}); it = open(path)",
        "a file in memory": f"import io; it = io.StringIO({LINES})",
        "a text wrapper": f"import io; it = io.TextIOWrapper(io.BytesIO({LINES}.encode()))",
        "a file with a name": f"import tempfile; it = tempfile.NamedTemporaryFile('w+'); it.write({LINES}); it.seek(0)",
        "a spooled file": "import tempfile; it = tempfile.SpooledTemporaryFile(); it.write(99 * b'x\\n'); it.seek(0)",
    },
    "next(it)": {
        "a file": f"import io; it = io.TextIOWrapper(io.BytesIO({LINES}.encode()))",
        "a count": "it = itertools.count()",
    },
    "it.read(1)": {
        "a raw file": "import tempfile; it = tempfile.TemporaryFile(buffering=0); it.write(bytes(99)); it.seek(0)",
        "a file of bytes": "import io; it = io.BufferedReader(io.BytesIO(bytes(99)))",
        "a compressed file": "import gzip, io; it = gzip.GzipFile(fileobj=io.BytesIO(gzip.compress(bytes(99))))",
    },
    "it.put(1)": {"a simple queue": "import queue; it = queue.SimpleQueue()"},
    "it.put_nowait(1)": {"a queue of asyncio": "import asyncio; it = asyncio.Queue()"},
    "it.acquire()": {"a semaphore": "import threading; it = threading.Semaphore(99)"},
    "it.prec += 1": {"a decimal context": "import decimal; it = decimal.Context()"},
    "it += 'x'": {"a text": "it = 300 * 'y'", "a UserString": "it = collections.UserString('')"},
    "it += b'x'": {"bytes": "it = 300 * b'y'"},
    "it += 1": {
        "a long number": "it = 10 ** 300",
        "one that Python does not write": "it = 10 ** 6000",
        "a fraction": "import fractions; it = fractions.Fraction(10 ** 300, 3)",
        "a decimal": "import decimal; decimal.getcontext().prec = 400; it = decimal.Decimal(10 ** 300)",
        "an address": "import ipaddress; it = ipaddress.ip_address('1.2.3.4')",
        "a distribution": "import statistics; it = statistics.NormalDist()",
        "a symbol's value": "import sympy; it = sympy.Integer(0)",
    },
    "it = np.str_(it + 'x')": {"a text of NumPy's": "it = np.str_(300 * 'y')"},
    "it = uuid.uuid5(it, 'x')": {"a uuid": "import uuid; it = uuid.UUID(int=1)"},
    "it = re.compile(it.pattern + 'a')": {"a pattern": "import re; it = re.compile('a')"},
    "it = re.compile('a').search(it.string, it.end())": {
        "a match": "import re; it = re.search('a', 99 * 'a')"
    },
    "it.move_to_end(next(iter(it)))": {
        "the order of an OrderedDict": "it = collections.OrderedDict.fromkeys(range(5))"
    },
    "(k, v), = it.items(); it.clear(); it[(k[0] + 1, 0)] = v": {"a key": "it = {(0, 0): None}"},
    "k = it.pop(); it.add((k[0] + 1, 0))": {"an element": "it = {(0, 0)}"},
    "k = it.pop(); it.add(frozenset([min(k) + 1]))": {"a set in a set": "it = {frozenset([0])}"},
    "it['a']['n'] = str(step.number)": {
        "a parser": "import configparser; it = configparser.ConfigParser(); it['a'] = {}; it['a']['n'] = '0'"
    },
    "it.n += 1": {"an attribute of a partial": "it = functools.partial(max, 0); it.n = 0"},
    "it.args = (it.args[0] + 1,)": {"an error": "it = ValueError(0)"},
    "it.cell_contents += 1": {"a cell": "import types; it = types.CellType(0)"},
    "it.run(n.set, step.number)": {
        "a context": "import contextvars; n = contextvars.ContextVar('n', default=0); n.set(0); it = contextvars.copy_context()"
    },
    "it[0, 0] += 1": {
        "a sparse matrix of lists": "import scipy.sparse; it = scipy.sparse.lil_matrix((3, 3)); it[0, 0] = 1"
    },
    "it = B if it is A else A": {
        "a class": "class A: pass\nclass B: pass\nit = A",
        "a class of Python's": "A, B = int, float; it = A",
        "a module": "A, B = math, random; it = A",
        "a dtype": "A, B = np.dtype('f4'), np.dtype('f8'); it = A",
        "a memory format": "A, B = torch.contiguous_format, torch.channels_last; it = A",
        "a time zone": "import datetime as d; A, B = d.timezone.utc, d.timezone(d.timedelta(hours=1)); it = A",
        "an object": "A, B = object(), object(); it = A",
        "an ellipsis": "A, B = None, ...; it = A",
    },
}
HARMLESS = {
    "a file that a step writes": ("import tempfile; log = tempfile.TemporaryFile('w')", "log.write('x')"),
    "a file that each step reads from its begin": (
        "import io; it = io.TextIOWrapper(io.BytesIO(b'abc'))",
        "it.seek(0); it.read(2)",
    ),
    "a writer of tables": ("import csv, io; out = csv.writer(open('/dev/null', 'w'))", "out.writerow([1])"),
    "constants": (
        "import re, uuid\npattern, name, kind, form = re.compile('a'), uuid.UUID(int=1), int, np.dtype('f4')",
        "print(pattern.match('b'), name, kind, form, math, end='\\r')",
    ),
    "an equal value in each step": (
        "import uuid; name = uuid.UUID(int=1)",
        "print(name, end='\\r'); name = uuid.UUID(int=1)",
    ),
    "a hash of each step": ("import hashlib", "h = hashlib.sha256(b'x'); h.update(b'y')"),
    "an iterator of each step": ("", "it = iter(bytes(4)); next(it)"),
}


def outcome_of(before, in_step):
    recipe = (
        f"{before}\nfor step in run_steps(model=model, optimizer=optimizer):\n    update()\n    {in_step}\n"
    )
    return loops.outcome(recipe, count=6)


def cases(table):
    return [
        pytest.param(before, in_step, id=f"{what}: {in_step}")
        for in_step, made in table.items()
        for what, before in made.items()
    ]


@pytest.mark.parametrize(("before", "in_step"), cases(REFUSED))
def test_an_iterator_or_generator_of_this_kind_that_the_loop_moves_is_refused(before, in_step):
    refused, _, _ = outcome_of(before, in_step)
    assert refused.startswith("it")
    assert "changed between step " in refused


@pytest.mark.parametrize(("before", "in_step"), cases(NAMED))
def test_an_object_of_this_kind_that_the_loop_changes_is_named(before, in_step):
    refused, changing, _ = outcome_of(before, in_step)
    assert not refused
    assert any(name.startswith("it") for name in changing)


@pytest.mark.parametrize("habit", HARMLESS)
def test_what_no_step_changes_or_reads_again_is_left_alone(habit):
    assert outcome_of(*HARMLESS[habit]) == ("", set(), set())


def test_the_place_of_a_file_that_loading_reads_is_not_told():
    """Each sample goes to its place first, and its contents are compared otherwise."""
    recipe = """
        import io
        rows = io.BytesIO(bytes(99))
        reader = io.BufferedReader(rows)
        class Rows(torch.utils.data.Dataset):
            def __getitem__(self, number):
                reader.seek(number)
                return reader.read(1)[0]
        dataset = Rows()
        for step in run_steps(dataset=dataset, model=model, optimizer=optimizer):
            update()
            step.mean_loss(lambda batch: dataset[step.number])
            dataset[step.number]
        """
    refused, changing, _ = loops.outcome(recipe, count=6)
    assert not refused
    assert "reader" not in changing


NUMBERS = st.integers() | st.integers(10**150, 10**400) | st.fractions() | st.decimals(allow_nan=False)
VALUES = NUMBERS | st.text() | st.text(min_size=250) | st.binary() | st.floats(allow_nan=False)


@given(VALUES, VALUES)
def test_texts_of_values_are_equal_where_the_values_are(one, other):
    is_same = type(one) is type(other) and repr(one) == repr(other)
    assert (plain_text(one) == plain_text(other)) == is_same


KEYS = st.recursive(st.integers() | st.text(), lambda inner: st.tuples(inner) | st.frozensets(inner))


@given(KEYS)
def test_keys_of_plain_values_have_a_hash_and_others_none(key):
    assert hash_of_key(key) == hash(key)
    assert hash_of_key((key, object())) is None
    assert hash_of_key([key]) is None
