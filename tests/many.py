"""Under torchrun: train.py's main() once for each line of a JSON file of command lines, in one process, because most of
a short run is the start of its processes. Every run connects the ranks anew."""
import faulthandler
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import train  # noqa: E402

for i, words in enumerate(json.loads(Path(sys.argv[1]).read_text())):
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(i)      # as if torchrun had started the ranks again
    sys.argv = ["train.py", *words]
    faulthandler.dump_traceback_later(150, exit=True)       # a hang says where
    try:
        train.main()
    except ValueError as e:
        print(f"refused: {e}", file=sys.stderr, flush=True)
        os._exit(2)
sys.stdout.flush()
os._exit(0)         # exit itself may abort where gloo's threads still run
