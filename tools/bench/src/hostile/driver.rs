//! Driver domain's process: that of `ringfence run`, without a sandbox, and with the verifying port.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use anyhow::{Context, bail};
use ringfence_driver::switch::process::serve_unconfined;
use ringfence_driver::switchboard::DriverConfig;
use ringfence_hostnet::causes::causes;
use ringfence_sandbox::channel::{Channel, ChannelError};
use ringfence_switch::dataplane::DataplaneHandle;
use ringfence_switch::forwarding::PortPolicy;

use super::orders::{HostileAnswer, RowCommand, SinkSetup};
use super::sink::{SinkPort, Tally};
use ringfence_testkit::hostile::adversary::SINK_MAC;

/// Serves launchers and guests in this thread, the parent in another one.
pub(super) fn serve(
    channel: Channel,
    (size, sink): (u32, SinkSetup),
    listener: OwnedFd,
) -> anyhow::Result<()> {
    let tally = Arc::new(Tally::default());
    let config = DriverConfig { switch: "bench".to_owned(), verbose: false, rings: 0 };
    serve_unconfined(&config, listener, |dataplane: &DataplaneHandle| {
        let policy = PortPolicy { mac: Some(SINK_MAC), ..PortPolicy::default() };
        dataplane
            .add_port(Box::new(SinkPort::new(size, sink, &tally)), policy, "sink")
            .map_err(std::io::Error::other)?;
        std::thread::Builder::new().name("orders".to_owned()).spawn(move || {
            if let Err(error) = obey(&channel, &tally) {
                eprintln!("ringfence: the driver domain's orders: {}", causes(&error));
            }
        })?;
        Ok(())
    })
    .context("the driver domain")
}

fn obey(channel: &Channel, tally: &Tally) -> anyhow::Result<()> {
    channel.send(&HostileAnswer::Ready, &[])?;
    loop {
        match channel.receive::<RowCommand>() {
            Ok((RowCommand::Victim(mac), _)) => {
                tally.set_victim(mac);
                channel.send(&HostileAnswer::Ready, &[])?;
            }
            Ok((RowCommand::Arrived, _)) => {
                channel.send(&HostileAnswer::Arrived(tally.now()), &[])?
            }
            Ok((RowCommand::Ask(_), _)) => bail!("the driver domain asks nobody"),
            Err(ChannelError::Closed) => return Ok(()),
            Err(error) => bail!(error),
        }
    }
}
