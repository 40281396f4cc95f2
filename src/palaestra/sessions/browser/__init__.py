"""Sessions in Chromium: the process, its DevTools connection, pages and their clock, and `BrowserSession`."""
