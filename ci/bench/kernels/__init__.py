"""The kernels against the machine's own rates and every peer found installed; on a CPU, a dry run of all of it."""
