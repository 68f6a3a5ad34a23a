"""Where memory lies and what is kept of the forward."""
