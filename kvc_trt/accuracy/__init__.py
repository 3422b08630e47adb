"""What each policy costs in answers: tasks asked of engines, cell by cell, beside the full cache."""
