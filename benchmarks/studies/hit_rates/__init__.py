"""Hit rates of observation windows: SnapKV's study of why observation works."""
