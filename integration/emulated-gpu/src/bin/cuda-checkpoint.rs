//! NVIDIA's command `cuda-checkpoint` for the emulated GPU.

use std::process::ExitCode;

fn main() -> ExitCode {
    stasis_emulated_gpu::utility::main(std::env::args_os())
}
