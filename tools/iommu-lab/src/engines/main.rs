#![forbid(unsafe_code)]
//! The engines of translation tables that need a device, tried inside the emulated machines of
//! `cargo xtask vm linux`: an IOMMU by VFIO, with a device behind it that does as it is told, and kernel
//! vhost-net, whose worker looks its addresses up.

mod edu;
mod iotlb;
mod kernel_log;
mod vfio;
mod vhost;

use std::process::ExitCode;

use clap::Parser;

#[derive(Parser)]
#[command(name = "engines", about = "Tries the engines of translation tables on devices")]
enum Command {
    /// Kernel vhost-net, told of memory that it may not use
    Vhost,
    /// QEMU's device `edu` behind an emulated IOMMU
    Vfio {
        /// Where it is: 0000:00:02.0
        device: String,
        /// What is tried
        #[arg(value_enum)]
        trial: vfio::Trial,
        /// By which of the kernel's interfaces
        #[arg(long, value_enum, default_value = "best")]
        by: vfio::By,
    },
    /// Kernel vhost-net, which looks addresses up in a table of the kernel's
    Iotlb {
        /// What is tried
        #[command(subcommand)]
        trial: iotlb::Trial,
    },
}

fn main() -> ExitCode {
    let done = match Command::parse() {
        Command::Vhost => vhost::run(),
        Command::Vfio { device, trial, by } => vfio::run(&device, trial, by),
        Command::Iotlb { trial } => iotlb::run(trial),
    };
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("engines: {error:#}");
            ExitCode::FAILURE
        }
    }
}
