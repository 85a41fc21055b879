"""Small programs that train with bigbatch, each in one file that runs by itself."""
