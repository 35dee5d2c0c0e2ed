//! Misuse of event channels.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ringfence_access::Mode;
use ringfence_frame::testing::frame;
use ringfence_sys::descriptors::testing::send_raw;
use ringfence_testkit::net::process::{alone, close_at_once, descriptors, descriptors_settled};
use ringfence_testkit::net::{HostileFrontend, Neighbour, Stage};
use ringfence_wire::netif::Status;
use ringfence_wire::xenbus::XenbusState;
use rustix::net::{SendFlags, Shutdown, send};

struct Scene {
    stage: Stage,
    neighbour: Neighbour,
    guest: HostileFrontend,
    seed: u32,
}

impl Scene {
    fn new() -> Scene {
        let mut stage = Stage::new(Mode::Copy);
        let neighbour = Neighbour::join(&mut stage);
        let guest = HostileFrontend::connected(&mut stage);
        Scene { stage, neighbour, guest, seed: 0 }
    }

    /// Sends one packet and runs one round. The guest requests an event for its response.
    fn send_packet(&mut self) {
        self.seed += 1;
        let sent = frame(self.seed, 200);
        let slots = self.guest.packet(1, &sent, &[200]);
        self.guest.tx.page.store_u32(12, self.guest.tx.rsp_prod() + 1, Ordering::Release).unwrap();
        self.guest.post(&slots);
        self.stage.round();
    }

    fn check_packet_arrives(&mut self) {
        self.send_packet();
        assert_eq!(self.stage.arrived(self.guest.vif).len(), 1);
        assert_eq!(self.guest.statuses(), [Status::Okay]);
    }

    fn clear_events(&mut self) -> Result<(), ringfence_frame::Fault> {
        self.stage.vifs[self.guest.vif].host.port.as_mut().unwrap().clear_events()
    }

    /// Checks that the device was closed under `rule` and that its guest can reconnect.
    fn check_device_closed(&mut self, rule: &str) {
        let vif = self.guest.vif;
        assert!(self.stage.vifs[vif].host.port.is_none(), "{rule}");
        assert_eq!(self.stage.rules(vif).get(rule), 1, "{:?}", self.stage.rules(vif).all());
        assert_eq!(self.stage.state(vif), XenbusState::Closing);
        self.neighbour.exchange(&mut self.stage);
        self.guest.connect(&mut self.stage, |_| {});
        self.check_packet_arrives();
    }
}

#[test]
fn xsa_332_full_channel_is_cleared_in_bounded_steps() {
    let mut scene = Scene::new();
    let sent = scene.guest.channels[0].fill();
    assert!(sent > 4096, "the guest filled its channel with {sent} bytes");
    scene.check_packet_arrives();
    scene.neighbour.exchange(&mut scene.stage);
    // Each call performs one bounded read. The channel becomes empty, since the guest sends no more.
    for _ in 0..=sent / 512 + 1 {
        scene.clear_events().unwrap();
    }
    scene.check_packet_arrives();
}

#[test]
fn notify_to_guest_that_never_reads_does_not_block() {
    let mut scene = Scene::new();
    // The blocking mode belongs to the guest's own end.
    for channel in &scene.guest.channels {
        rustix::io::ioctl_fionbio(&channel.socket, false).unwrap();
    }
    let begun = Instant::now();
    for _ in 0..3000 {
        scene.check_packet_arrives();
    }
    let taken = (0..).take_while(|_| scene.guest.channels[0].take()).count();
    assert!(taken > 0, "the guest was not notified");
    assert!(begun.elapsed() < Duration::from_secs(60));
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn closed_tx_channel_closes_device() {
    let mut scene = Scene::new();
    close_at_once(std::mem::take(&mut scene.guest.channels));
    scene.send_packet();
    scene.check_device_closed("channel_closed");
}

#[test]
fn closed_rx_channel_closes_device() {
    let mut scene = Scene::new();
    close_at_once(scene.guest.channels.pop());
    scene.guest.rx.page.store_u32(12, 1, Ordering::Release).unwrap();
    scene.guest.post_buffers([16]);
    assert_eq!(scene.stage.send(scene.guest.vif, &[frame(1, 60)]), None);
    scene.check_device_closed("channel_closed");
}

#[test]
fn channel_shut_down_in_one_direction_closes_device() {
    // Sending to the guest fails: the next notification detects it.
    let mut scene = Scene::new();
    scene.guest.channels[0].shut(Shutdown::Read);
    scene.send_packet();
    scene.check_device_closed("channel_closed");
    // The guest cannot send: the backend detects it when it clears the event.
    let mut scene = Scene::new();
    scene.guest.channels[0].shut(Shutdown::Write);
    scene.clear_events().unwrap();
    assert!(scene.clear_events().is_err(), "the closed channel is not detected");
    assert_eq!(scene.stage.rules(scene.guest.vif).get("channel_closed"), 1);
    scene.neighbour.exchange(&mut scene.stage);
}

#[test]
fn descriptors_sent_over_channel_are_closed() {
    alone("channels::descriptors_sent_over_channel_are_closed", check_surplus_descriptors);
}

fn check_surplus_descriptors() {
    let mut scene = Scene::new();
    let spare = rustix::fs::memfd_create("spare", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    let before = descriptors();
    for _ in 0..50 {
        let mut went = 0;
        let mut refused = None;
        while went < 20 && refused.is_none() {
            match send_raw(&scene.guest.channels[0].socket, &[1], &[spare.as_fd(); 40]) {
                Ok(()) => went += 1,
                Err(error) => refused = error.raw_os_error(),
            }
        }
        // From Linux 6.16 on, the socket refuses descriptors, so the guest sends none.
        assert!(
            went > 0 || refused == Some(libc::EPERM),
            "the guest sends descriptors: {refused:?}"
        );
        for _ in 0..went {
            scene.clear_events().unwrap();
        }
        scene.check_packet_arrives();
    }
    scene.neighbour.exchange(&mut scene.stage);
    assert!(descriptors_settled(before) <= before, "the backend kept descriptors");
}

#[test]
fn out_of_band_data_on_channel_is_ignored() {
    let mut scene = Scene::new();
    for _ in 0..100 {
        // Kernels without out-of-band data for these sockets refuse it, which is also correct.
        let _ = send(&scene.guest.channels[0].socket, &[1], SendFlags::OOB | SendFlags::DONTWAIT);
        scene.clear_events().unwrap();
        scene.check_packet_arrives();
    }
    scene.neighbour.exchange(&mut scene.stage);
}

/// A thread notifies on both channels as fast as it can, while the backend's thread serves the other guest
/// and clears every event.
#[test]
fn xsa_331_event_storm_leaves_other_guest_served() {
    let mut scene = Scene::new();
    let stop = Arc::new(AtomicBool::new(false));
    let (seen, channels) = (Arc::clone(&stop), core::mem::take(&mut scene.guest.channels));
    let storm = std::thread::spawn(move || {
        let mut sent = 0u64;
        while !seen.load(Ordering::Relaxed) {
            channels.iter().for_each(|channel| channel.notify());
            sent += 2;
        }
        (sent, channels)
    });
    let begun = Instant::now();
    let mut exchanges = 0u32;
    while begun.elapsed() < Duration::from_millis(300) || exchanges < 50 {
        scene.clear_events().unwrap();
        scene.neighbour.exchange(&mut scene.stage);
        exchanges += 1;
        assert!(begun.elapsed() < Duration::from_secs(60), "{exchanges} exchanges beside a storm");
    }
    stop.store(true, Ordering::Relaxed);
    let (sent, channels) = storm.join().unwrap();
    assert!(sent > 1000, "{sent} notifications are no storm");
    scene.guest.channels = channels;
    scene.check_packet_arrives();
}
