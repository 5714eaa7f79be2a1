/* ddtree.models._kernels: takes addresses from `ddtree.models.kernels`, which has checked them.
 *
 * Not linked to an OpenMP library: the symbols are those of the one that torch has loaded, so both
 * share one pool of threads. Where they are missing the import fails, and torch does the work.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include "attention.h"
#include "elementwise.h"
#include "linear.h"
#include "paged_attention.h"

typedef unsigned long long address;

static const float *floats(address at) { return (const float *)(size_t)at; }
static const int32_t *int32s(address at) { return (const int32_t *)(size_t)at; }

static PyObject *supported(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyBool_FromLong(ddtree_linear_supported());
}

static PyObject *linear(PyObject *self, PyObject *args) {
    (void)self;
    address x, packed, bias, y;
    Py_ssize_t M, N, K;
    int num_threads, lanes;
    if (!PyArg_ParseTuple(args, "KKKKnnnii", &x, &packed, &bias, &y, &M, &N, &K, &num_threads,
                          &lanes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    ddtree_linear(floats(x), floats(packed), floats(bias), (float *)(size_t)y, M, N, K,
                  num_threads, lanes);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *pairs_supported(PyObject *self, PyObject *unused) {
    (void)self, (void)unused;
    return PyBool_FromLong(ddtree_linear_pairs_supported());
}

static PyObject *linear_pairs(PyObject *self, PyObject *args) {
    (void)self;
    address x, packed, bias, y;
    Py_ssize_t M, N, K;
    int num_threads, failed;
    if (!PyArg_ParseTuple(args, "KKKKnnni", &x, &packed, &bias, &y, &M, &N, &K, &num_threads))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    failed = ddtree_linear_pairs(floats(x), (const void *)(size_t)packed, floats(bias),
                                 (float *)(size_t)y, M, N, K, num_threads);
    Py_END_ALLOW_THREADS
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *attention(PyObject *self, PyObject *args) {
    (void)self;
    address query, keys, values, mask, out;
    ddtree_attention_args a;
    int num_threads;
    if (!PyArg_ParseTuple(args, "(Knnn)(Knnn)(Knnn)(Knn)K(nnnn)(nnn)fi", &query,
                          &a.query_request, &a.query_head, &a.query_row, &keys, &a.key_request,
                          &a.key_head, &a.key_row, &values, &a.value_request, &a.value_head,
                          &a.value_row, &mask, &a.mask_request, &a.mask_row, &out,
                          &a.num_requests, &a.num_rows, &a.num_keys, &a.num_open, &a.num_heads,
                          &a.num_kv_heads, &a.width, &a.scale, &num_threads))
        return NULL;
    a.query = floats(query), a.keys = floats(keys), a.values = floats(values);
    a.mask = floats(mask), a.out = (float *)(size_t)out;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = ddtree_attention(&a, num_threads);
    Py_END_ALLOW_THREADS
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *paged_attention(PyObject *self, PyObject *args) {
    (void)self;
    address query, keys, values, key_cache, value_cache, out, starts, rows, lens, tables, words;
    ddtree_paged_attention_args a;
    int num_threads;
    if (!PyArg_ParseTuple(args, "((Knn)(Knn)(Knn)(Knn)(Knn)(Knn))(KKK)(Kn)(Kn)(nnnnn)fi", &query,
                          &a.query_row, &a.query_head, &keys, &a.key_row, &a.key_head, &values,
                          &a.value_row, &a.value_head, &key_cache, &a.key_cache_block,
                          &a.key_cache_head, &value_cache, &a.value_cache_block,
                          &a.value_cache_head, &out, &a.out_row, &a.out_head, &starts, &rows,
                          &lens, &tables, &a.table_request, &words, &a.num_words, &a.num_requests,
                          &a.num_heads, &a.num_kv_heads, &a.width, &a.block_size, &a.scale,
                          &num_threads))
        return NULL;
    a.query = floats(query), a.keys = floats(keys), a.values = floats(values);
    a.key_cache = floats(key_cache), a.value_cache = floats(value_cache);
    a.out = (float *)(size_t)out;
    a.row_starts = int32s(starts), a.num_rows = int32s(rows), a.context_lens = int32s(lens);
    a.block_tables = int32s(tables), a.ancestor_words = (const int64_t *)(size_t)words;
    int failed;
    Py_BEGIN_ALLOW_THREADS
    failed = ddtree_paged_attention(&a, num_threads);
    Py_END_ALLOW_THREADS
    if (failed) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *rms_norm(PyObject *self, PyObject *args) {
    (void)self;
    address x, weight, y;
    Py_ssize_t M, D;
    float eps;
    if (!PyArg_ParseTuple(args, "KKKnnf", &x, &weight, &y, &M, &D, &eps)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    ddtree_rms_norm(floats(x), floats(weight), (float *)(size_t)y, M, D, eps);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyObject *swiglu(PyObject *self, PyObject *args) {
    (void)self;
    address gate, up, y;
    Py_ssize_t count;
    int num_threads;
    if (!PyArg_ParseTuple(args, "KKKni", &gate, &up, &y, &count, &num_threads)) return NULL;
    Py_BEGIN_ALLOW_THREADS
    ddtree_swiglu(floats(gate), floats(up), (float *)(size_t)y, count, num_threads);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"supported", supported, METH_NOARGS, "Whether this processor can run the others."},
    {"linear", linear, METH_VARARGS, "x, packed, bias or 0, y as addresses; M, N, K, threads, lanes."},
    {"pairs_supported", pairs_supported, METH_NOARGS, "Whether it can run linear_pairs."},
    {"linear_pairs", linear_pairs, METH_VARARGS,
     "x, packed, bias or 0, y as addresses; M, N, K, threads."},
    {"attention", attention, METH_VARARGS,
     "query, keys, values as (address, request, head, row), mask as (address or 0, request, row), "
     "out; requests, rows, keys, open; heads, key-value heads, width; scale, threads. Strides in "
     "floats."},
    {"paged_attention", paged_attention, METH_VARARGS,
     "query, keys, values as (address, row, head), key and value cache as (address, block, head) "
     "and out as (address, row, head) in one tuple; row starts, rows, context lengths; block tables "
     "and ancestor words as (address, row); requests, heads, key-value heads, width, block size; scale, threads. "
     "Strides in elements."},
    {"rms_norm", rms_norm, METH_VARARGS, "x, weight, y as addresses; M, D, eps."},
    {"swiglu", swiglu, METH_VARARGS, "gate, up, y as addresses; elements, threads."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "ddtree.models._kernels", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModule_Create(&module); }
