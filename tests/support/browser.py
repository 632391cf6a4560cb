"""A headless browser (Chromium)."""

import shutil
import subprocess

NAMES = ("chromium", "chromium-browser", "google-chrome")
COMMAND = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
    # Frames of files, for scripts of other files.
    *("--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=8000"),
)


def find_browser():
    """Return the path of a Chromium, or None."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def shown_in_browser(page, script, folder):
    """Return the HTML that a browser shows of a page after a script, and the errors it reports.

    Args:
        page: The text of the page.
        script: JavaScript that is run once the page is loaded.
        folder: Where the page and the profile of the browser are written.
    """
    path = folder / "page.html"
    path.write_text(f"{page}<script>addEventListener('load', () => {{ {script} }})</script>")
    process = subprocess.run(
        [find_browser(), *COMMAND, f"--user-data-dir={folder}/profile", "--dump-dom", path],
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = process.stderr.splitlines()
    return process.stdout, [line for line in lines if "CONSOLE" in line and "Uncaught" in line]
