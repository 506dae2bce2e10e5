"""A wrong path, option or name is told before torch is imported: in a fraction of a second, whatever the verb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

from deltacompress.cli.given import early
from deltacompress.devices import check_driver
from deltacompress.errors import BackendError, OutputError
from deltacompress.zoo import Zoo

RUNS_ALL = """
import io, json, sys
from contextlib import redirect_stderr
from deltacompress.cli.main import main
found = {}
for name, argv in json.load(sys.stdin).items():
    told = io.StringIO()
    with redirect_stderr(told):
        code = main(argv)
    rooms = ("torch", "transformers", "datasets", "numpy", *sys.argv[1:])
    heavy = [room for room in rooms if room in sys.modules]
    found[name] = (code, told.getvalue(), heavy)
print(json.dumps(found))
"""


REFUSES_THE_NETWORK = """
import socket
def nobody(*where, **_):
    raise AssertionError(f"asked the network: {where}")
socket.getaddrinfo = socket.socket.connect = nobody
"""


def run_all(cases: dict[str, list[str]], cwd: Path, *rooms: str) -> dict[str, tuple[int, str, list[str]]]:
    done = subprocess.run(
        [sys.executable, "-c", REFUSES_THE_NETWORK + RUNS_ALL, *rooms],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        cwd=cwd,
        check=True,
    )
    return {name: tuple(told) for name, told in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def wrong(repo_root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str, list[str]]]:
    spec = spec_from_file_location("error_seconds", repo_root / "tools" / "error_seconds.py")
    assert spec is not None
    assert spec.loader is not None
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    work = tmp_path_factory.mktemp("work")
    Zoo.init(str(work / "zoo"))
    tool.occupied_out(work)
    return run_all(tool.cases(tool.shipped_model(repo_root), str(work / "zoo")), work)


def test_what_is_wrong_is_told_without_torch(wrong: dict[str, tuple[int, str, list[str]]]) -> None:
    assert len(wrong) > 40
    for name, (code, told, heavy) in wrong.items():
        assert heavy == [], name
        assert code in (2, 3), name
        assert told.startswith("error: "), name
        assert told.count("\n") == 1, name
        assert "internal error" not in told, name


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("analyze: no fine-tuned model", "/no/such/place: no such directory"),
        ("compress: no recipe of that name", "no recipe named 'int2-42'; did you mean int2-24?"),
        ("compress: no calibration data", "recipe int2-24 calibrates: give --calibration"),
        ("compress: no such calibration file", "nowhere.jsonl: no such file"),
        ("compress: no calibration data, models of the hub", "recipe int2-24 calibrates: give --calibration"),
        ("compress: a slip in a local path", "occupied/notes: no such directory; give one with config.json"),
        ("compress: a local path that begins with a dot", "/nobody/notes: no such directory; give one with config"),
        ("compress: a model of the hub, and a slip", "/no/such/place: no such directory; give one with config.json"),
        ("compress: out is occupied", "occupied: exists already, and holds thesis.docx, which is none of ours"),
        (
            "compress: out is in a file",
            "/file is a file, where a directory is needed; choose another --out",
        ),
        ("restore: out is occupied", "occupied: exists already, and holds thesis.docx, which is none of ours"),
        ("export: out is occupied", "occupied: exists already, and holds thesis.docx"),
        ("dequantize: out is occupied", "occupied: exists already, and holds thesis.docx"),
        ("analyze: out is a file", "file: is a file, where a directory is needed; choose another --out"),
        ("eval: out is a file", "file: is a file, where a directory is needed; choose another --out"),
        ("compare: out is a file", "file: is a file, where a directory is needed; choose another --out"),
        ("demo: out is a file", "file: is a file, where a directory is needed; choose another --out"),
        ("eval: no such calibration file", "nowhere.jsonl: no such file"),
        ("compare: no such calibration file", "nowhere.jsonl: no such file"),
        ("compare: no method of that name", "--methods: unknown method 'int2-42'; did you mean int2-24"),
        ("bench obs: a size that cannot be", "--size 66: must be a multiple of 4"),
        ("bench pairs: no data", "/no/such/place: no such directory"),
        ("bench pairs: no such task", "no such file; task nothing needs a checkpoint"),
        ("compress: no gate of that name", "no policy named 'strictest'"),
        (
            "compress: a name that cannot be, and no zoo",
            "team/support-bot; and give --zoo PATH, or set DELTACOMPRESS_ZOO",
        ),
        ("verify: no base", "/no/such/place: no such directory"),
        ("restore: no artifact", "no such artifact directory"),
        ("inspect: a model", "registry/demo/base: a model's checkpoint, not an artifact; give what"),
        ("gate: another JSON file", "config.json: not a report of `deltacompress eval`, such as"),
        ("eval: no task of that name", "unknown task 'nothing'"),
        ("eval: no policy of that name", "no policy named 'strictest'"),
        ("eval: no artifact", "no such artifact /no/such/place"),
        ("compare: no task of that name", "unknown task 'nothing'"),
        ("eval: a label that cannot be", "label 'a b'"),
        ("eval: no such backend", "--backend"),
        ("generate: top-p out of range", "--top-p 2.0: give a share of the probability"),
        ("generate: a prompt of other bytes", "PROMPT is not valid UTF-8 (character 0); give it as UTF-8 text"),
        ("generate: no finite temperature", "--temperature inf: give 0 (always the most likely token), or a finite"),
        ("restore: out is in a zoo", "zoo/out: lies inside the zoo "),
        ("compress: a gate that names no tasks", "policy default requires no tasks by name, so say what to measure"),
        ("eval: no tasks", "--tasks: no task named; there are "),
        ("zoo list: no finite ratio", "--min-ratio nan: give a finite number"),
        ("serve: no base", "/no/such/place: no such directory"),
        ("serve: no artifact", "no such artifact directory"),
        ("serve: no name", "/no/such/place: is not NAME=SOURCE; such as bot=path/of/artifact"),
        ("serve: a name twice", "the name bot: is given twice; name each variant once"),
        ("serve: the base's own name", "is the base's own name; give another"),
        ("serve: no key on an open address", "no key is asked of them; give --api-key-file, or serve on 127.0.0.1"),
        ("serve: no such key file", "--api-key-file /no/such/place: No such file"),
        ("serve: no such port", "--port 65536: give a port"),
        ("serve: no size", "--budget much: is no size; give one such as 20GB"),
        ("serve: a drain without an end", "--drain inf: give seconds"),
        ("serve: no size of the cache", "--prefix-cache much: is no size; give one such as 1GB, or 0"),
        ("serve: no size of swap space", "--swap-space much: is no size; give one such as 8GB, or 0"),
        ("serve: swap space of several devices", "--swap-space: is for one device; leave out one of it and --tp"),
        ("serve: no zoo to open", "--open-zoo: needs a zoo; give --zoo"),
        ("serve: no such zoo", "/no/such/place: "),
        ("serve: no such zoo, from which nothing is loaded yet", "/no/such/place: no such directory; make a zoo there"),
        ("bench pairs: no models", "/no/such/place: no such directory"),
    ],
)
def test_what_is_wrong_is_what_is_told(wrong: dict[str, tuple[int, str, list[str]]], name: str, words: str) -> None:
    assert words in wrong[name][1]


def test_what_a_slip_needs_no_more_of_is_not_imported(tmp_path: Path, repo_root: Path) -> None:
    """Each costs tens of milliseconds: rich draws tables, and colours for terminals only."""
    (tmp_path / "file").write_text("")
    pair = [str(repo_root / "registry" / "demo" / name) for name in ("base", "palindrome")]
    asked = ["--tasks", "demo-palindrome", "--calibration", "x.jsonl", "--methods", "int2-42"]
    cases = {
        "compare": ["compare", *pair, *asked, "--out", "out"],
        "compress": ["compress", *pair, "--recipe", "lossless", "--out", "file/out"],
    }
    found = run_all(cases, tmp_path, "rich.table", "rich.console", "deltacompress.artifact.manifest")
    assert {name: (code, heavy) for name, (code, _, heavy) in found.items()} == dict.fromkeys(cases, (2, []))


def test_what_is_in_no_zoo_imports_no_zoo(tmp_path: Path, repo_root: Path) -> None:
    base = ["--base", str(repo_root / "registry" / "demo" / "base")]
    out = ["--out", "out"]
    cases = {
        "inspect": ["inspect", "/no/such/place"],
        "verify": ["verify", "/no/such/place", *base],
        "restore": ["restore", "/no/such/place", *base, *out],
        "export": ["export", "/no/such/place", *out],
        "generate": ["generate", "/no/such/place", "hello", *base],
        "eval": ["eval", "/no/such/place", *base, *out, "--tasks", "demo-palindrome"],
    }
    for name, (code, told, heavy) in run_all(cases, tmp_path, "deltacompress.zoo").items():
        assert (code, heavy) == (2, []), name
        assert "no such artifact" in told, name


def test_what_needs_no_tensor_imports_no_torch(tmp_path: Path, artifact: Path) -> None:
    """What succeeds, too, where only manifests and files are read."""
    Zoo.init(str(tmp_path / "zoo"))
    named = ["--zoo", str(tmp_path / "zoo"), "--quiet"]
    cases = {
        "inspect": ["inspect", str(artifact), "--quiet"],
        "zoo add": ["zoo", "add", str(artifact), "team/bot", *named],
        "zoo list": ["zoo", "list", *named],
        "zoo show": ["zoo", "show", "team/bot", *named],
        "zoo verify": ["zoo", "verify", *named],
        "zoo pull": ["zoo", "pull", "team/bot", "pulled", *named],
        "zoo gc": ["zoo", "gc", *named],
    }
    for name, (code, told, heavy) in run_all(cases, tmp_path).items():
        assert (code, told, heavy) == (0, "", []), name


def test_a_gpu_is_missed_at_once_where_no_driver_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        asked.append(name)
        raise OSError(name)

    asked: list[str] = []
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(Path, "exists", lambda _: False)
    monkeypatch.setattr("ctypes.CDLL", absent)
    check_driver("cpu", "auto")
    assert asked == []
    with pytest.raises(BackendError, match="device cuda: torch sees no CUDA GPU here; give cpu"):
        check_driver("cpu", "cuda")
    assert asked == ["libcuda.so.1"]
    monkeypatch.setattr("ctypes.CDLL", asked.append)
    check_driver("cuda")


def test_a_gpu_of_another_kind_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: pytest.fail("looked for NVIDIA's driver"))
    monkeypatch.setattr("sys.platform", "darwin")
    check_driver("cuda")
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/kfd")
    check_driver("cuda")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_output_that_cannot_be_made(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    for check in (early.output, early.folder):
        with pytest.raises(OutputError, match=r"out: cannot be written \(Permission denied\); choose another"):
            check(tmp_path / "new" / "out")


def test_whether_a_method_calibrates() -> None:
    assert early.methods("")
    assert early.methods("int2-24,rtn-4bit")
    assert not early.methods("rtn-4bit")


def test_whether_a_run_waits(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert not early.waits(out)
    (tmp_path / "out.partial").mkdir()
    assert early.waits(out)
    (tmp_path / "out.partial").rmdir()
    (tmp_path / "out.candidate.partial").mkdir()
    assert early.waits(out)
