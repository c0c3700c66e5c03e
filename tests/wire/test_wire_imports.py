import subprocess
import sys


def test_the_wire_needs_neither_torch_nor_trio():
    code = (
        "import sys, pkgutil, importlib, yeto.wire\n"
        "for m in pkgutil.iter_modules(yeto.wire.__path__): importlib.import_module('yeto.wire.' + m.name)\n"
        "print(sorted({'torch', 'trio', 'transformers'} & sys.modules.keys()))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
