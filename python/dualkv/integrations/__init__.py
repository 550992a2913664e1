"""Packed attention for training frameworks. Import the module of the framework that you use; importing this
package imports none of them."""
