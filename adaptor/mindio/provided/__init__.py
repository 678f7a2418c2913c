"""A folder for `sys.path`, and no package to import from; see `adaptor.mindio.provide`."""
