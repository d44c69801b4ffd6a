# The tests in a fresh clone with another Python: make -f clone.mk FROM=CHECKOUT PYTHON=python3.13
test:
	git clone --quiet $(FROM) clone
	$(MAKE) -C clone test PYTHON=$(PYTHON)
