"""``python -m art_cli`` is ``art``."""

from art_cli.main import main

if __name__ == "__main__":
    main()
