"""``python -m art_cli`` runs ``art``."""

from art_cli.main import main

if __name__ == "__main__":
    main()
