"""The work of the patches, by framework: imported once the framework is."""
