"""`python -m ragen` is the `ragen` command."""

from ragen import lifeline

lifeline.hold()  # first: a process that another one has started may already be alone

from ragen.cli import main  # noqa: E402

raise SystemExit(main())
