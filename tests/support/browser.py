"""A page in a real browser: Chromium without a window, driven by Selenium.

What the page says on its console, and every request that it makes, is kept for the test to judge.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import apt
from selenium.webdriver import Chrome, ChromeOptions, ChromeService
from selenium.webdriver.support.wait import WebDriverWait

# A page that `serve` draws on a busy machine may be a minute old (report/views.py).
LIMIT_S = 120.0
_FLAGS = ("--headless=new", "--disable-dev-shm-usage", "--hide-scrollbars")


class Page:
    def __init__(self, driver: Chrome, url: str, size: tuple[int, int]) -> None:
        self._driver = driver
        driver.switch_to.new_window("tab")
        window = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **window)
        self.complaints()
        self.requests()  # those of the page before
        driver.get(url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression, or of what its promise brings."""
        return self._driver.execute_script(f"return {expression}")

    def wait(self, expression: str) -> Any:
        """The first true value."""
        wait = WebDriverWait(self._driver, LIMIT_S, poll_frequency=0.05)
        return wait.until(lambda _: self.evaluate(expression), f"waited in vain for {expression}")

    def mouse(self, kind: str, x: float, y: float, clicks: int = 0) -> None:
        """kind: mouseMoved, mousePressed or mouseReleased."""
        # While a button is held, a move says so.
        held = {
            "button": "left" if clicks else "none",
            "buttons": int(clicks > 0 and kind != "mouseReleased"),
        }
        self._call("Input.dispatchMouseEvent", type=kind, x=x, y=y, clickCount=clicks, **held)

    def drag(self, x: float, to: float, y: float) -> None:
        self.mouse("mouseMoved", x, y)
        self.mouse("mousePressed", x, y, 1)
        self.mouse("mouseMoved", (x + to) / 2, y, 1)
        self.mouse("mouseMoved", to, y, 1)
        self.mouse("mouseReleased", to, y, 1)

    def complaints(self) -> list[Any]:
        """What the console of the page has of errors and warnings since the last call."""
        return [each for each in self._log("browser") if each["level"] in ("SEVERE", "WARNING")]

    def requests(self) -> list[str]:
        """The URLs that it has asked for since the last call, with that of the page itself."""
        logged = [json.loads(each["message"])["message"] for each in self._log("performance")]
        sent = [each["params"] for each in logged if each["method"] == "Network.requestWillBeSent"]
        return [each["request"]["url"] for each in sent]

    def close(self) -> None:
        self._driver.close()
        self._driver.switch_to.window(self._driver.window_handles[0])

    def _log(self, kind: str) -> list[Any]:
        return list(self._driver.get_log(kind))  # type: ignore[no-untyped-call]

    def _call(self, method: str, **params: Any) -> None:
        """One of the DevTools protocol."""
        self._driver.execute_cdp_cmd(method, params)


class Browser:
    def __init__(self, driver: Chrome) -> None:
        self._driver = driver

    def open(self, url: str, *, size: tuple[int, int] = (1280, 900)) -> Page:
        return Page(self._driver, url, size)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Installs the browser where there is none; raises NotAvailable."""
    apt.need("chromedriver", "chromium-driver")
    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in (*_FLAGS, *(["--no-sandbox"] if os.geteuid() == 0 else [])):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options, ChromeService("/usr/bin/chromedriver"))
    driver.set_script_timeout(LIMIT_S)
    try:
        yield Browser(driver)
    finally:
        driver.quit()
