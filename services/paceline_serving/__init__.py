"""What every gRPC process of Paceline shares. No torch."""
