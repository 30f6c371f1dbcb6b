//! Products with weights of the activations' 16-bit element through cuBLASLt, where its library is there.
//!
//! Products of many rows are bound by the matrix units, of which the `mma.sync` of `tile.cuh` reaches about 62 % on Hopper;
//! NVIDIA's library has kernels with `wgmma` for them, and from [`MIN_ROWS`] rows on some that read the weight faster. It chooses one by the number of rows, so a row's bits
//! depend on its batch: a device that is `batch_invariant` makes these products in `tile.rs`, and so does a machine without
//! the library. It is opened at run time, like the driver.

use super::driver::Driver;
use super::error::failure;
use super::stream::Stream;
use super::sync::lock;
use super::tile_operands::{TileOut, TileRows};
use cudarc::cublaslt::sys;
use ferrum_types::{Result, SrcDtype};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::ptr::{from_ref, null_mut};
use std::sync::{Arc, Mutex};

/// Fewest rows of a product. With 64 the library reads weights at 70 to 87 % of what a copy reaches on an H100, tiles of 64 rows at 47 to 66 %
/// on an H200; fewer rows are what narrow tiles and `gemv.cu` are for.
pub(super) const MIN_ROWS: usize = 17;

/// Bytes that a kernel may use beside its operands, as PyTorch has it for Hopper.
pub(super) const WORKSPACE: usize = 32 << 20;

/// Plans that are kept: prompts are cut into chunks of many lengths, and each is a shape of its own.
const MAX_PLANS: usize = 4096;

/// Elements that the rows of all operands are multiples of: 16 bytes, which the fast kernels need.
const ALIGNED: usize = 8;

/// Elements that a result's first column is a multiple of: 256 bytes, which kernels are chosen for.
pub(super) const ALIGNED_START: usize = 128;

/// `CUBLAS_OP_T`, which the bindings have with cuBLAS only.
const TRANSPOSED: i32 = 1;

/// What a kernel is chosen by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Shape {
    rows: usize,
    columns: usize,
    k: usize,
    /// Elements of a row of the result.
    n: usize,
    is_f32: bool,
}

/// The library on one device, and the kernels that it has chosen.
pub(super) struct Blas {
    handle: sys::cublasLtHandle_t,
    /// Of both factors, and of results that are not f32.
    dtype: sys::cudaDataType,
    /// `None` for shapes that it has no kernel for.
    plans: Mutex<HashMap<Shape, Option<Plan>>>,
    driver: Arc<Driver>,
}

// SAFETY: the library's documentation lets a handle be used from several threads; plans are behind a lock.
unsafe impl Send for Blas {}
// SAFETY: as above.
unsafe impl Sync for Blas {}

/// Descriptions of a product and of its operands, and the kernel.
struct Plan {
    product: sys::cublasLtMatmulDesc_t,
    /// Weight, rows, result.
    layouts: [sys::cublasLtMatrixLayout_t; 3],
    kernel: sys::cublasLtMatmulAlgo_t,
}

fn check(op: &'static str, status: sys::cublasStatus_t) -> Result<()> {
    match status {
        sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS => Ok(()),
        status => Err(failure(op, format!("cuBLASLt says {status:?}"))),
    }
}

/// Whether the library takes this product at all. Memory of the device begins at multiples of 256 bytes; results are written
/// where the columns of a slab begin.
pub(super) fn takes(x: TileRows, out: TileOut) -> bool {
    let aligned = x.k.is_multiple_of(ALIGNED)
        && out.n.is_multiple_of(ALIGNED)
        && out.first.is_multiple_of(ALIGNED_START);
    x.rows >= MIN_ROWS && x.k > 0 && out.columns > 0 && aligned
}

impl Blas {
    /// For factors of `dtype`. `None` for those of f32, and where there is no library, or it does not work with this driver.
    pub(super) fn open(driver: &Arc<Driver>, dtype: SrcDtype) -> Option<Self> {
        let dtype = match dtype {
            SrcDtype::BF16 => sys::cudaDataType::CUDA_R_16BF,
            SrcDtype::F16 => sys::cudaDataType::CUDA_R_16F,
            SrcDtype::F32 => return None,
        };
        driver.bind("open").ok()?;
        let mut handle = null_mut();
        // SAFETY: opens a library by its name, whose initialisers are NVIDIA's; the handle outlives the call.
        let status = unsafe {
            if !sys::is_culib_present() {
                return None;
            }
            sys::cublasLtCreate(&mut handle)
        };
        check("open", status).ok()?;
        Some(Self {
            handle,
            dtype,
            plans: Mutex::default(),
            driver: Arc::clone(driver),
        })
    }

    /// `out = x · weightᵀ` with the matrix at `weight`, whose rows have `x.k` elements; false, and nothing is done, where
    /// there is no kernel for it. `workspace` is the address of [`WORKSPACE`] bytes that nothing else in the stream uses.
    ///
    /// # Errors
    /// `Device` with what the library says.
    pub(super) fn product(
        &self,
        op: &'static str,
        stream: &Stream,
        x: TileRows,
        weight: u64,
        out: TileOut,
        workspace: u64,
    ) -> Result<bool> {
        let shape = Shape {
            rows: x.rows,
            columns: out.columns,
            k: x.k,
            n: out.n,
            is_f32: out.is_f32,
        };
        let mut plans = lock(&self.plans);
        if plans.len() >= MAX_PLANS {
            plans.clear();
        }
        let plan = match plans.entry(shape) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(new) => new.insert(Plan::new(op, (self.handle, self.dtype), shape)?),
        };
        let Some(plan) = plan else {
            return Ok(false);
        };
        self.driver.bind(op)?;
        let (one, zero) = (1f32, 0f32);
        let size = if out.is_f32 { 4 } else { 2 };
        let result = (out.at + (out.first * size) as u64) as *mut c_void;
        let [of_weight, of_rows, of_result] = plan.layouts;
        // SAFETY: the layouts are those of `shape`; the operands are memory of the device that the op's check has found to
        // be long enough, the workspace has the bytes that the kernel was chosen for, and freeing memory waits for all work.
        let status = unsafe {
            sys::cublasLtMatmul(
                self.handle,
                plan.product,
                from_ref(&one).cast(),
                weight as *const c_void,
                of_weight,
                x.at as *const c_void,
                of_rows,
                from_ref(&zero).cast(),
                result,
                of_result,
                result,
                of_result,
                &plan.kernel,
                workspace as *mut c_void,
                WORKSPACE,
                stream.raw().cast(),
            )
        };
        check(op, status).map(|()| true)
    }
}

impl Drop for Blas {
    fn drop(&mut self) {
        lock(&self.plans).clear();
        if self.driver.bind("close").is_ok() {
            // SAFETY: made by `open`, and no plan is left.
            unsafe { sys::cublasLtDestroy(self.handle) };
        }
    }
}

impl Plan {
    /// `None` where the library has no kernel.
    fn new(
        op: &'static str,
        (handle, dtype): (sys::cublasLtHandle_t, sys::cudaDataType),
        shape: Shape,
    ) -> Result<Option<Self>> {
        let Shape {
            rows,
            columns,
            k,
            n,
            is_f32,
        } = shape;
        let f32 = sys::cudaDataType::CUDA_R_32F;
        let of_result = if is_f32 { f32 } else { dtype };
        let mut plan = Self {
            product: null_mut(),
            layouts: [null_mut(); 3],
            kernel: sys::cublasLtMatmulAlgo_t { data: [0; 8] },
        };
        // Matrices are stored by columns there, so a row here is a column: resultᵀ = weight · xᵀ, whose first factor is turned.
        let layouts = [
            (dtype, k, columns, k),
            (dtype, k, rows, k),
            (of_result, columns, rows, n),
        ];
        let attribute = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        let compute = sys::cublasComputeType_t::CUBLAS_COMPUTE_32F;
        // SAFETY: what is made is kept by `plan`, which destroys it; the attribute has the size of its type.
        unsafe {
            check(
                op,
                sys::cublasLtMatmulDescCreate(&mut plan.product, compute, f32),
            )?;
            let (value, size) = (from_ref(&TRANSPOSED).cast(), size_of_val(&TRANSPOSED));
            let set = sys::cublasLtMatmulDescSetAttribute(plan.product, attribute, value, size);
            check(op, set)?;
            for (layout, (dtype, height, width, stride)) in plan.layouts.iter_mut().zip(layouts) {
                let (height, width) = (height as u64, width as u64);
                let made =
                    sys::cublasLtMatrixLayoutCreate(layout, dtype, height, width, stride as i64);
                check(op, made)?;
            }
        }
        let found = plan.choose(op, handle)?;
        Ok(found.then_some(plan))
    }

    /// Has the library choose the kernel; false where it has none.
    fn choose(&mut self, op: &'static str, handle: sys::cublasLtHandle_t) -> Result<bool> {
        let mut limits = Limits(null_mut());
        let attribute =
            sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
        let [of_weight, of_rows, of_result] = self.layouts;
        let mut count = 0;
        // SAFETY: numbers and null pointers, which all bits of zero are; the library writes at most the one that is asked for.
        let mut found: sys::cublasLtMatmulHeuristicResult_t = unsafe { std::mem::zeroed() };
        // SAFETY: all are live; the attribute is one of eight bytes.
        let status = unsafe {
            check(op, sys::cublasLtMatmulPreferenceCreate(&mut limits.0))?;
            let (value, size) = (from_ref(&WORKSPACE).cast(), size_of_val(&WORKSPACE));
            let set = sys::cublasLtMatmulPreferenceSetAttribute(limits.0, attribute, value, size);
            check(op, set)?;
            sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                self.product,
                of_weight,
                of_rows,
                of_result,
                of_result,
                limits.0,
                1,
                &mut found,
                &mut count,
            )
        };
        if status == sys::cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED || count == 0 {
            return Ok(false);
        }
        check(op, status)?;
        self.kernel = found.algo;
        Ok(found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS)
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: each was made by `new` or is null, which is not given to the library.
        unsafe {
            for layout in self.layouts.into_iter().filter(|layout| !layout.is_null()) {
                sys::cublasLtMatrixLayoutDestroy(layout);
            }
            if !self.product.is_null() {
                sys::cublasLtMatmulDescDestroy(self.product);
            }
        }
    }
}

/// What a kernel may use.
struct Limits(sys::cublasLtMatmulPreference_t);

impl Drop for Limits {
    fn drop(&mut self) {
        if !self.0.is_null() {
            // SAFETY: made by `choose`.
            unsafe { sys::cublasLtMatmulPreferenceDestroy(self.0) };
        }
    }
}
