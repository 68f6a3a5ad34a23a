"""Rules on several processes that train together: FO701 and up."""
