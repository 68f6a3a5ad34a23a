"""Where memory is placed, and what is kept of the forward."""
