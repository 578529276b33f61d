"""The command `promoe` as a whole: what is the same for all of its verbs."""

from __future__ import annotations

import subprocess
import sys

import pytest

from promoe import cli
from promoe.commands.run import command as running


def test_an_interruption_is_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(options: running.Options) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "answer", interrupt)
    assert cli.main(["run", "model", "Why?"]) == 130
    assert "interrupted" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["demo", "run"])
def test_help_explains_every_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    options = [line.split()[0] for line in text.splitlines() if line.startswith("  --")]
    assert "--cache" in options
    assert "--max-new-tokens" in options
    assert "_" not in "".join(options)
    assert "Args:" not in text


def test_unknown_commands_and_options_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["fly"], ["run"], ["demo", "--speed", "9"], ["run", "m", "p", "--max-new-tokens", "many"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 2, arguments
    capsys.readouterr()


def test_help_in_a_process_of_its_own_imports_no_torch() -> None:
    script = (
        "import sys\n"
        "from promoe import cli\n"
        "try:\n    cli.main(['run', '--help'])\n"
        "except SystemExit:\n    pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'tqdm'} & set(sys.modules)\n"
        "sys.exit(f'imported {sorted(heavy)}' if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "--max-new-tokens" in done.stdout
