"""`ttp doctor`: checks of a machine before there is a job."""
