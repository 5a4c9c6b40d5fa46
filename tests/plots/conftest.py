"""Fixtures of the explorer's tests."""

from browser import browser as browser
from explorer_page import address as address
from explorer_page import page as page
from explorer_page import watched as watched
