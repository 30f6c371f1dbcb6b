//! The `ferrum` program. What it does is in the library, so that its compilation overlaps with that of the crates
//! before it: cargo starts a program only when all of them are done, a library as soon as their types are known.

use std::process::ExitCode;

fn main() -> ExitCode {
    quiet_vulkan_layers();
    ferrum::main()
}

/// Mesa's device-select layer asks a Wayland display for its order of devices, and complains on stderr
/// where there is none, as on any server. We order devices ourselves, so the layer is disabled.
fn quiet_vulkan_layers() {
    if std::env::var_os("XDG_RUNTIME_DIR").is_none() {
        // SAFETY: this is the first statement of the program: no other thread reads the environment.
        unsafe { std::env::set_var("NODEVICE_SELECT", "1") };
    }
}
