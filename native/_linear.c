/* ddtree.models._linear: takes addresses from `ddtree.models.packed`, which has checked them.
 *
 * Not linked to an OpenMP library: the symbols are those of the one that torch has loaded, so both
 * share one pool of threads. Where they are missing the import fails, and torch does the work.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "linear.h"

static PyObject *supported(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyBool_FromLong(ddtree_linear_supported());
}

static PyObject *linear(PyObject *self, PyObject *args) {
    (void)self;
    unsigned long long x, packed, bias, y;
    Py_ssize_t M, N, K;
    int num_threads;
    if (!PyArg_ParseTuple(args, "KKKKnnni", &x, &packed, &bias, &y, &M, &N, &K, &num_threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ddtree_linear((const float *)(size_t)x, (const float *)(size_t)packed,
                  (const float *)(size_t)bias, (float *)(size_t)y, M, N, K, num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"supported", supported, METH_NOARGS, "Whether this processor can run `linear`."},
    {"linear", linear, METH_VARARGS, "x, packed, bias or 0, y as addresses; M, N, K, threads."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "ddtree.models._linear", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__linear(void) { return PyModule_Create(&module); }
