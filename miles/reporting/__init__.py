"""Reads a run folder and draws it: one offline HTML page, one picture for a README."""
