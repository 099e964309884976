"""The operating system: files, folders, memory, threads, child processes and installed packages."""
