//! What `ferrum --version` says: enough for a report of a fault.

use ferrum_engine::BackendKind;
use ferrum_kernels::cpu::Isa;
use std::sync::LazyLock;

/// The version, with where it comes from and what it can use here.
pub(crate) fn long() -> &'static str {
    static TEXT: LazyLock<String> = LazyLock::new(|| {
        format!(
            "{}\ncommit     {}\ntarget     {}\nbackends   {}\nCPU level  {}",
            env!("CARGO_PKG_VERSION"),
            env!("FERRUM_COMMIT"),
            env!("FERRUM_TARGET"),
            BackendKind::compiled().join(", "),
            Isa::best()
        )
    });
    &TEXT
}
