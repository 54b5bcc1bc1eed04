"""The commands of docs/experiments.md do what is written beside them."""

import re

import pytest
from dry_runs import ROOT, dry_run, seed_text

from ragen.experiment import spec

pytestmark = pytest.mark.usefixtures("resolved_once")

TEXT = (ROOT / "docs/experiments.md").read_text()
COMMANDS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: re.sub(r"\s+", " ", line)[:70])
def test_command(line):
    command, _, remark = line.partition("#")
    done = dry_run(re.sub(r"\s+", " ", command).strip())
    assert done.status == 0, done.errors
    count = re.match(r" (\d+) runs", remark)
    assert len(done.runs) == (int(count[1]) if count else 6)


def test_every_experiment_is_documented():
    for name in spec.names():
        assert f"bash {spec.load(name).script}" in TEXT


def test_every_command_of_the_published_documents_is_there():
    shown = [re.sub(r"\s+", " ", line.partition("#")[0]).strip() for line in COMMANDS]
    for seed in ("000", "001", "002", "004"):
        text = seed_text(seed).replace("\\\n", " ")
        for line in re.findall(r"^bash (?:scripts/|run_all).*$", text, flags=re.MULTILINE):
            assert re.sub(r"\s+", " ", line).strip() in shown
