//! A driver for QEMU's teaching device (its `docs/specs/edu.rst`), by VFIO. It moves up to a page between
//! memory and a buffer of its own, and notices nothing when the IOMMU refuses it.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use iommu_lab::vfio::Device;

/// Registers, by their offset in the device's first region.
const IDENTIFICATION: u64 = 0x00;
const DMA_SOURCE: u64 = 0x80;
const DMA_DESTINATION: u64 = 0x88;
const DMA_COUNT: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;

/// The device's own address of its buffer of a page.
const BUFFER: u32 = 0x4_0000;

/// The longest transfer: some versions of QEMU take the octet after the last one for a part of it, and end.
pub(crate) const LONGEST: usize = 4095;

const START: u32 = 1;
const TO_MEMORY: u32 = 2;

/// A transfer takes a tenth of a second of the device's time.
const PATIENCE: Duration = Duration::from_secs(60);

/// The device.
pub(crate) struct Edu {
    device: Device,
    registers: u64,
}

impl Edu {
    /// Takes the device into use.
    pub(crate) fn new(device: Device) -> anyhow::Result<Edu> {
        let (registers, len) = device.region(0).context("the device's registers")?;
        anyhow::ensure!(len >= 0x10_0000, "registers of {len} octets: this is another device");
        device.enable().context("letting the device work")?;
        let edu = Edu { device, registers };
        let id = edu.read(IDENTIFICATION)?;
        anyhow::ensure!(id & 0xff == 0xed, "the device calls itself {id:#x}, not edu");
        Ok(edu)
    }

    /// Has `len` octets moved from `address` in memory into the device's buffer.
    pub(crate) fn fetch(&self, address: u64, len: usize) -> anyhow::Result<()> {
        self.start(address, len, false)?;
        self.wait()
    }

    /// Has `len` octets of the device's buffer moved to `address` in memory.
    pub(crate) fn store(&self, address: u64, len: usize) -> anyhow::Result<()> {
        self.start_store(address, len)?;
        self.wait()
    }

    /// As [`Edu::store`], without waiting for the end.
    pub(crate) fn start_store(&self, address: u64, len: usize) -> anyhow::Result<()> {
        self.start(address, len, true)
    }

    fn start(&self, address: u64, len: usize, to_memory: bool) -> anyhow::Result<()> {
        // Beyond its buffer the device would run over memory of QEMU.
        anyhow::ensure!(len <= LONGEST, "{len} octets are more than the device's buffer");
        let address =
            u32::try_from(address).context("addresses written in one piece have 32 bits")?;
        let (source, destination) = if to_memory { (BUFFER, address) } else { (address, BUFFER) };
        self.write(DMA_SOURCE, source)?;
        self.write(DMA_DESTINATION, destination)?;
        self.write(DMA_COUNT, u32::try_from(len)?)?;
        self.write(DMA_COMMAND, START | if to_memory { TO_MEMORY } else { 0 })
    }

    /// Waits for the end of the transfer.
    pub(crate) fn wait(&self) -> anyhow::Result<()> {
        let end = Instant::now() + PATIENCE;
        while self.read(DMA_COMMAND)? & START != 0 {
            anyhow::ensure!(Instant::now() < end, "the device does not end a transfer");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    fn read(&self, register: u64) -> anyhow::Result<u32> {
        self.device.read(self.registers + register).context("reading a register")
    }

    fn write(&self, register: u64, value: u32) -> anyhow::Result<()> {
        self.device.write(self.registers + register, value).context("writing a register")
    }
}
