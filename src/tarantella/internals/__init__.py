"""What is used of Keras and TensorFlow beyond their public names: a module for each."""
