"""`python -m ragen` is the `ragen` command."""

from ragen.cli import main

raise SystemExit(main())
