//! Driver of QEMU's teaching device `edu` (QEMU's `docs/specs/edu.rst`), by VFIO.
//!
//! The device moves up to a page between memory and a buffer of its own. It does not report accesses
//! that the IOMMU refuses.

use std::time::{Duration, Instant};

use anyhow::Context as _;
use iommu_lab::vfio::Device;

/// Registers, as offsets in the device's first region.
const IDENTIFICATION: u64 = 0x00;
const DMA_SOURCE: u64 = 0x80;
const DMA_DESTINATION: u64 = 0x88;
const DMA_COUNT: u64 = 0x90;
const DMA_COMMAND: u64 = 0x98;

/// Device address of its page-sized buffer.
const BUFFER: u32 = 0x4_0000;

/// Maximum transfer: some versions of QEMU count the byte after the last one too, and abort.
pub(crate) const LONGEST: usize = 4095;

const START: u32 = 1;
const TO_MEMORY: u32 = 2;

/// Time limit of a transfer, which takes a tenth of a second of device time.
const PATIENCE: Duration = Duration::from_secs(60);

/// Device in use by this process.
pub(crate) struct Edu {
    device: Device,
    registers: u64,
}

impl Edu {
    /// Enables the device and checks its identification.
    pub(crate) fn new(device: Device) -> anyhow::Result<Edu> {
        let (registers, len) = device.region(0).context("the device's registers")?;
        anyhow::ensure!(len >= 0x10_0000, "registers of {len} bytes: this is another device");
        device.enable().context("letting the device work")?;
        let edu = Edu { device, registers };
        let id = edu.read(IDENTIFICATION)?;
        anyhow::ensure!(id & 0xff == 0xed, "the device calls itself {id:#x}, not edu");
        Ok(edu)
    }

    /// Moves `len` bytes from `address` in memory into the device's buffer.
    pub(crate) fn fetch(&self, address: u64, len: usize) -> anyhow::Result<()> {
        self.start(address, len, false)?;
        self.wait()
    }

    /// Moves `len` bytes of the device's buffer to `address` in memory.
    pub(crate) fn store(&self, address: u64, len: usize) -> anyhow::Result<()> {
        self.start_store(address, len)?;
        self.wait()
    }

    /// Starts the transfer of [`Edu::store`] without waiting for its end.
    pub(crate) fn start_store(&self, address: u64, len: usize) -> anyhow::Result<()> {
        self.start(address, len, true)
    }

    fn start(&self, address: u64, len: usize, to_memory: bool) -> anyhow::Result<()> {
        // Beyond its buffer the device would overwrite memory of QEMU.
        anyhow::ensure!(len <= LONGEST, "{len} bytes are more than the device's buffer");
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
