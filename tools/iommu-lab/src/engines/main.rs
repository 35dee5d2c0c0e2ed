#![forbid(unsafe_code)]
//! Trials of the translation table engines that need a device, for the emulated machines of
//! `cargo xtask vm linux`: an IOMMU by VFIO with a programmable device behind it, and kernel vhost-net,
//! whose worker translates addresses.

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
    /// Kernel vhost-net with a descriptor that points to memory outside its table
    Vhost,
    /// QEMU's device `edu` behind an emulated IOMMU
    Vfio {
        /// PCI address of the device: 0000:00:02.0
        device: String,
        /// Trial to run
        #[arg(value_enum)]
        trial: vfio::Trial,
        /// Kernel interface to use
        #[arg(long, value_enum, default_value = "best")]
        by: vfio::By,
    },
    /// Kernel vhost-net, which translates addresses by a table in the kernel
    Iotlb {
        /// Trial to run
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
