"""Models with a recurrent state: open tiles where they have a form, else rows one by one."""
