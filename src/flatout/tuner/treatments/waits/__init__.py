"""What makes the host wait or work beside the step, done less often."""
