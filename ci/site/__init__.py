"""The site of all pages, built by mkdocs (`make docs`): the pages stand beside the code, and are collected here."""
