"""The systems that semel is measured and tested against, and semel's broker, each as a real process."""
