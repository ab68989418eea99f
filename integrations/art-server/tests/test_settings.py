"""Where a server's settings come from."""

from art_server import settings

FILE, ENVIRONMENT = "token-from-a-file-0123456789", "token-from-the-environment-01"


def test_a_container_gives_the_token_as_a_file_and_the_environment_beats_it(tmp_path, monkeypatch):
    (tmp_path / "art_server_token").write_text(f"{FILE}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(settings, "SECRETS", tmp_path)
    monkeypatch.delenv("ART_SERVER_TOKEN", raising=False)
    assert settings.load_settings().server_token.get_secret_value() == FILE
    monkeypatch.setenv("ART_SERVER_TOKEN", ENVIRONMENT)
    assert settings.load_settings().server_token.get_secret_value() == ENVIRONMENT


def test_a_token_is_not_shown_where_settings_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ART_SERVER_TOKEN", ENVIRONMENT)
    assert ENVIRONMENT not in repr(settings.load_settings())
