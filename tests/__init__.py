"""Never shipped; a package so that `tests.servers` means this folder and no other."""
