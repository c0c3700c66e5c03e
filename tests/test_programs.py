import subprocess
import sys

import pytest

STARTS = (
    "import subprocess, sys; from yeto.programs import module_words;"
    "sys.exit(subprocess.call(module_words('json.tool', '--help')))"
)


@pytest.mark.parametrize(("safe", "code"), [(["-P"], 0), ([], 7)])
def test_a_program_takes_modules_from_the_working_folder_only_where_its_parent_does(tmp_path, safe, code):
    (tmp_path / "argparse.py").write_text("raise SystemExit(7)")
    done = subprocess.run(
        [sys.executable, *safe, "-c", STARTS], cwd=tmp_path, capture_output=True, timeout=200
    )
    assert done.returncode == code, done.stderr
