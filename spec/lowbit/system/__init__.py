"""What lowbit asks of the operating system: files, folders, memory, threads, child processes, text on a terminal."""
