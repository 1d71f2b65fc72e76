"""Server processes: ours, floors and peers."""
