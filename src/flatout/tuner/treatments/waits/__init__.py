"""Do less often what makes the host wait or work beside the step."""
