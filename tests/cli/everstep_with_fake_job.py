"""The command `everstep`, with the stand-in for its job process and a small job for its demo."""

import sys
from pathlib import Path

from elastic import cli, demo, launch

launch.JOB_PROCESS = ("-P", str(Path(__file__).with_name("fake_job.py")))
demo.EXAMPLE = Path("job.yaml").absolute()
sys.exit(cli.main())
