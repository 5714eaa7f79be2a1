/* ddtree.tree._native: converts, checks shapes, releases the GIL; the work is in the core.
 *
 * Keeps to the limited API of Python 3.11, the first with buffers in it: one wheel for 3.11 and on.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <stdlib.h>
#include <string.h>

#include "ancestor_mask.h"
#include "build_tree.h"
#include "calibration.h"
#include "gumbel.h"

/* Borrows a C-contiguous array of native items; `codes` are the letters its format may be. */
static int borrow(PyObject *array, const char *name, const char *codes, Py_ssize_t itemsize,
                  int flags, Py_buffer *view) {
    if (PyObject_GetBuffer(array, view, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | flags) < 0) return -1;
    const char *format = view->format;
    if (view->itemsize == itemsize && strlen(format) == 1 && strchr(codes, format[0])) return 0;
    PyErr_Format(PyExc_TypeError, "%s: expected items \"%s\" of %zd bytes, got \"%s\" of %zd", name,
                 codes, itemsize, format, view->itemsize);
    PyBuffer_Release(view);
    return -1;
}

/* Rows side by side in one bytearray: token_ids, parents, depths, ranks, log_probs. */
static PyObject *packed(const ddtree_rows *rows, size_t num_rows) {
    const size_t wide = num_rows * sizeof(int64_t), narrow = num_rows * sizeof(int32_t);
    PyObject *made = PyByteArray_FromStringAndSize(NULL, (Py_ssize_t)(wide + 4 * narrow));
    if (made == NULL) return NULL;
    char *bytes = PyByteArray_AsString(made);
    memcpy(bytes, rows->token_ids, wide);
    memcpy(bytes + wide, rows->parents, narrow);
    memcpy(bytes + wide + narrow, rows->depths, narrow);
    memcpy(bytes + wide + 2 * narrow, rows->ranks, narrow);
    memcpy(bytes + wide + 3 * narrow, rows->log_probs, narrow);
    return made;
}

/* Runs the core without the GIL; None for marginals that it refuses. */
static PyObject *built(const ddtree_marginals *marginals, int64_t root_id, int64_t budget) {
    const size_t bytes_per_row =
        sizeof(ddtree_candidate) + sizeof(int64_t) + 4 * sizeof(int32_t) + sizeof(float);
    ddtree_rows rows;
    char *work = NULL;
    int64_t num_rows = 0;
    Py_BEGIN_ALLOW_THREADS
    const int64_t max_rows = ddtree_max_rows(marginals, budget);
    if (max_rows > 0 && (uint64_t)max_rows <= SIZE_MAX / bytes_per_row)
        work = malloc((size_t)max_rows * bytes_per_row);
    if (max_rows == DDTREE_BAD_MARGINALS) {
        num_rows = DDTREE_BAD_MARGINALS;
    } else if (work != NULL) {
        rows.heap = (ddtree_candidate *)work; /* the widest items first: all are aligned */
        rows.token_ids = (int64_t *)(rows.heap + max_rows);
        rows.parents = (int32_t *)(rows.token_ids + max_rows);
        rows.depths = rows.parents + max_rows;
        rows.ranks = rows.depths + max_rows;
        rows.columns = rows.ranks + max_rows;
        rows.log_probs = (float *)(rows.columns + max_rows);
        num_rows = ddtree_build_tree(marginals, root_id, max_rows, &rows);
    }
    Py_END_ALLOW_THREADS
    PyObject *result;
    if (num_rows == DDTREE_BAD_MARGINALS) result = Py_NewRef(Py_None);
    else result = num_rows > 0 ? packed(&rows, (size_t)num_rows) : PyErr_NoMemory();
    free(work);
    return result;
}

/* Borrows the arrays of a draft: two [L, K], and for a first-order one two [L - 1, K, K].
 *
 * Returns how many views are held, 0 with an exception, or DDTREE_BAD_MARGINALS for shapes that do
 * not fit each other. */
static int borrow_marginals(PyObject *const *arrays, int num_arrays, Py_buffer *views,
                            ddtree_marginals *marginals) {
    static const char *const names[] = {"log_probs", "token_ids", "transitions", "followers"};
    static const char *const codes[] = {"f", "lq", "f", "lq"};
    static const Py_ssize_t sizes[] = {sizeof(float), sizeof(int64_t)};
    int num_held = 0, fits = 1;
    while (num_held < num_arrays && borrow(arrays[num_held], names[num_held], codes[num_held],
                                           sizes[num_held % 2], 0, &views[num_held]) == 0)
        num_held++;
    if (num_held == num_arrays) {
        const Py_ssize_t *shape = views[0].shape;
        for (int i = 1; i < num_arrays; i += 2) {
            const Py_buffer *said = &views[i - 1], *ids = &views[i];
            fits &= said->ndim == ids->ndim &&
                    !memcmp(said->shape, ids->shape, (size_t)said->ndim * sizeof *shape);
        }
        if (fits && views[0].ndim == 2 && shape[0] <= INT32_MAX && shape[1] <= INT32_MAX) {
            *marginals = (ddtree_marginals){views[0].buf, views[1].buf, shape[0], shape[1], NULL,
                                            NULL};
            if (num_arrays == 4) {
                const Py_ssize_t *behind = views[2].shape;
                fits = views[2].ndim == 3 && behind[0] == shape[0] - (shape[0] > 0) &&
                       behind[1] == shape[1] && behind[2] == shape[1];
                marginals->transitions = views[2].buf;
                marginals->followers = views[3].buf;
            }
            if (fits) return num_held;
        } else if (fits) {
            PyErr_SetString(PyExc_ValueError, "log_probs: expected [L, K], L and K below 2**31");
        }
    }
    while (num_held > 0) PyBuffer_Release(&views[--num_held]);
    return fits ? 0 : DDTREE_BAD_MARGINALS;
}

PyDoc_STRVAR(build_tree_doc,
             "build_tree(log_probs, token_ids, root_id, budget, [transitions, followers])\n--\n\n"
             "The rows of the best tree; None if the marginals are not legal.\n\n"
             "Args: log_probs [L, K] float32, token_ids [L, K] int64; of a first-order draft\n"
             "transitions [L - 1, K, K] float32, followers [L - 1, K, K] int64; C-contiguous.\n"
             "Returns: a bytearray of 24 N bytes: token_ids int64, then parents, depths, ranks\n"
             "int32, then log_probs float32.");

static PyObject *build_tree(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 4 && num_args != 6) {
        PyErr_Format(PyExc_TypeError, "build_tree takes 4 or 6 arguments, got %zd", num_args);
        return NULL;
    }
    const int64_t root_id = PyLong_AsLongLong(args[2]);
    if (root_id == -1 && PyErr_Occurred()) return NULL;
    int overflow;
    int64_t budget = PyLong_AsLongLongAndOverflow(args[3], &overflow);
    if (budget == -1 && PyErr_Occurred()) return NULL;
    if (overflow) budget = overflow > 0 ? INT64_MAX : 0;

    PyObject *arrays[] = {args[0], args[1], NULL, NULL};
    if (num_args == 6) memcpy(arrays + 2, args + 4, 2 * sizeof *arrays);
    Py_buffer views[4];
    ddtree_marginals marginals;
    int num_held = borrow_marginals(arrays, (int)num_args - 2, views, &marginals);
    if (num_held == DDTREE_BAD_MARGINALS) return Py_NewRef(Py_None);
    if (num_held == 0) return NULL;
    PyObject *result = built(&marginals, root_id, budget);
    while (num_held > 0) PyBuffer_Release(&views[--num_held]);
    return result;
}

PyDoc_STRVAR(ancestor_mask_doc,
             "ancestor_mask(parents, mask)\n--\n\n"
             "Fill mask [N, N] bool from parents [N] int32; both C-contiguous.");

static PyObject *ancestor_mask(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 2) {
        PyErr_Format(PyExc_TypeError, "ancestor_mask takes 2 arguments, got %zd", num_args);
        return NULL;
    }
    Py_buffer parents, mask;
    if (borrow(args[0], "parents", "il", sizeof(int32_t), 0, &parents) < 0) return NULL;
    if (borrow(args[1], "mask", "?", 1, PyBUF_WRITABLE, &mask) < 0) {
        PyBuffer_Release(&parents);
        return NULL;
    }
    PyObject *result = NULL;
    const Py_ssize_t num_rows = parents.ndim == 1 ? parents.shape[0] : -1;
    if (mask.ndim != 2 || mask.shape[0] != num_rows || mask.shape[1] != num_rows) {
        PyErr_SetString(PyExc_ValueError, "mask: expected [N, N] for parents [N]");
    } else {
        size_t wrong;
        Py_BEGIN_ALLOW_THREADS
        wrong = ddtree_ancestor_mask(parents.buf, (size_t)num_rows, mask.buf);
        Py_END_ALLOW_THREADS
        if (wrong) PyErr_Format(PyExc_ValueError, "parents: row %zu precedes its parent", wrong);
        else result = Py_NewRef(Py_None);
    }
    PyBuffer_Release(&parents);
    PyBuffer_Release(&mask);
    return result;
}

/* Borrows counts [L, 2 J + 2], bins [2, J] and log_probs with D <= L; 0 if all is well.
 *
 * Log-probs are [D, K], or [D, M, K] where `most_dims` is 3. */
static int borrow_calibration(PyObject *const *args, int counts_flags, int most_dims,
                              Py_buffer views[3], ddtree_bins *bins, ddtree_said *said) {
    static const char *const names[] = {"counts", "bins", "log_probs"};
    static const char *const codes[] = {"d", "d", "f"};
    static const Py_ssize_t sizes[] = {sizeof(double), sizeof(double), sizeof(float)};
    int num_held = 0;
    while (num_held < 3 &&
           borrow(args[num_held], names[num_held], codes[num_held], sizes[num_held],
                  num_held == 0 ? counts_flags : 0, &views[num_held]) == 0)
        num_held++;
    if (num_held == 3) {
        const Py_ssize_t *counted = views[0].shape, *binned = views[1].shape;
        const Py_ssize_t *shape = views[2].shape;
        const int ndim = views[2].ndim;
        if (views[0].ndim == 2 && views[1].ndim == 2 && ndim >= 2 && ndim <= most_dims &&
            binned[0] == 2 && binned[1] >= 1 && binned[1] <= DDTREE_MAX_BINS && counted[1] == 2 * binned[1] + 2 &&
            shape[0] <= counted[0]) {
            const double *centres = views[1].buf;
            *bins = (ddtree_bins){centres, centres + binned[1], binned[1]};
            *said = (ddtree_said){views[2].buf, NULL, shape[0], ndim == 3 ? shape[1] : 1,
                                  shape[ndim - 1]};
            return 0;
        }
        PyErr_SetString(PyExc_ValueError,
                        "expected counts [L, 2 J + 2], bins [2, J], log_probs [D <= L, K]"
                        " or, for worth, [D <= L, M, K]");
    }
    while (num_held > 0) PyBuffer_Release(&views[--num_held]);
    return -1;
}

/* The first `num_chosen` items of a tuple of ints; NULL with an exception if that fails. */
static int64_t *tokens_of(PyObject *tuple, Py_ssize_t num_chosen) {
    int64_t *tokens = malloc((size_t)(num_chosen + 1) * sizeof *tokens);
    if (tokens == NULL) {
        PyErr_NoMemory();
        return NULL;
    }
    for (Py_ssize_t i = 0; i < num_chosen; i++) {
        PyObject *item = PyTuple_GetItem(tuple, i);
        tokens[i] = item == NULL ? -1 : PyLong_AsLongLong(item);
        if (tokens[i] != -1 || !PyErr_Occurred()) continue;
        free(tokens);
        return NULL;
    }
    return tokens;
}

PyDoc_STRVAR(count_doc,
             "count(counts, bins, log_probs, token_ids, chosen, fade)\n--\n\n"
             "Let counts [L, 2 J + 2] float64 fade and add the choices of one round.\n\n"
             "Args: bins [2, J] float64, log_probs [D, K] float32, token_ids [D, K] int64, chosen a\n"
             "tuple of ints, of which the first D at most are read; arrays are C-contiguous.");

static PyObject *count(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 6) {
        PyErr_Format(PyExc_TypeError, "count takes 6 arguments, got %zd", num_args);
        return NULL;
    }
    const double fade = PyFloat_AsDouble(args[5]);
    if (fade == -1.0 && PyErr_Occurred()) return NULL;
    if (!PyTuple_Check(args[4])) {
        PyErr_SetString(PyExc_TypeError, "chosen: expected a tuple");
        return NULL;
    }
    Py_ssize_t num_chosen = PyTuple_Size(args[4]);
    Py_buffer views[3], token_ids;
    ddtree_bins bins;
    ddtree_said said;
    if (borrow_calibration(args, PyBUF_WRITABLE, 2, views, &bins, &said) < 0) return NULL;
    if (num_chosen > said.num_depths) num_chosen = (Py_ssize_t)said.num_depths;
    PyObject *result = NULL;
    if (borrow(args[3], "token_ids", "lq", sizeof(int64_t), 0, &token_ids) == 0) {
        int64_t *chosen = NULL;
        if (token_ids.len != 2 * views[2].len)
            PyErr_SetString(PyExc_ValueError, "token_ids: expected the shape of log_probs");
        else chosen = tokens_of(args[4], num_chosen);
        if (chosen != NULL) {
            said.token_ids = token_ids.buf;
            ddtree_count(views[0].buf, views[0].shape[0], &bins, &said, chosen, num_chosen, fade);
            result = Py_NewRef(Py_None);
        }
        free(chosen);
        PyBuffer_Release(&token_ids);
    }
    for (int i = 0; i < 3; i++) PyBuffer_Release(&views[i]);
    return result;
}

PyDoc_STRVAR(worth_doc,
             "worth(counts, bins, log_probs, out, prior_weight, prior_tokens)\n--\n\n"
             "Fill out float32 with what log_probs [D, K] or [D, M, K] float32 are worth.\n\n"
             "Args: counts [L, 2 J + 2] and bins [2, J] float64; arrays are C-contiguous.");

static PyObject *worth(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 6) {
        PyErr_Format(PyExc_TypeError, "worth takes 6 arguments, got %zd", num_args);
        return NULL;
    }
    const double prior_weight = PyFloat_AsDouble(args[4]);
    const double prior_tokens = PyFloat_AsDouble(args[5]);
    if (PyErr_Occurred()) return NULL;
    Py_buffer views[3], out;
    ddtree_bins bins;
    ddtree_said said;
    if (borrow_calibration(args, 0, 3, views, &bins, &said) < 0) return NULL;
    PyObject *result = NULL;
    if (borrow(args[3], "out", "f", sizeof(float), PyBUF_WRITABLE, &out) == 0) {
        if (out.len == views[2].len) {
            ddtree_worth(views[0].buf, &bins, &said, prior_weight, prior_tokens, out.buf);
            result = Py_NewRef(Py_None);
        } else {
            PyErr_SetString(PyExc_ValueError, "out: expected the shape of log_probs");
        }
        PyBuffer_Release(&out);
    }
    for (int i = 0; i < 3; i++) PyBuffer_Release(&views[i]);
    return result;
}

PyDoc_STRVAR(gumbel_doc,
             "gumbel(seed, position, noise)\n--\n\n"
             "Fill noise [V] float32, C-contiguous, with that of a seed and a position.");

static PyObject *gumbel(PyObject *module, PyObject *const *args, Py_ssize_t num_args) {
    (void)module;
    if (num_args != 3) {
        PyErr_Format(PyExc_TypeError, "gumbel takes 3 arguments, got %zd", num_args);
        return NULL;
    }
    const uint64_t seed = PyLong_AsUnsignedLongLong(args[0]);
    if (seed == UINT64_MAX && PyErr_Occurred()) return NULL;
    const uint64_t position = PyLong_AsUnsignedLongLong(args[1]);
    if (position == UINT64_MAX && PyErr_Occurred()) return NULL;
    Py_buffer noise;
    if (borrow(args[2], "noise", "f", sizeof(float), PyBUF_WRITABLE, &noise) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS
    ddtree_gumbel(seed, position, noise.buf, noise.len / (Py_ssize_t)sizeof(float));
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&noise);
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"build_tree", (PyCFunction)(void (*)(void))build_tree, METH_FASTCALL, build_tree_doc},
    {"ancestor_mask", (PyCFunction)(void (*)(void))ancestor_mask, METH_FASTCALL,
     ancestor_mask_doc},
    {"count", (PyCFunction)(void (*)(void))count, METH_FASTCALL, count_doc},
    {"worth", (PyCFunction)(void (*)(void))worth, METH_FASTCALL, worth_doc},
    {"gumbel", (PyCFunction)(void (*)(void))gumbel, METH_FASTCALL, gumbel_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{0, NULL}};

static PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "The compiled core of ddtree.tree.", 0, methods, slots,
    NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
