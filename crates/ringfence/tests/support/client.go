// Fetches each URL of the command line with net/http, and prints the page, or the milliseconds until the error and the error.
package main

import (
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"os"
	"time"
)

func main() {
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	client := http.Client{Timeout: 20 * time.Second, Transport: transport}
	for _, url := range os.Args[1:] {
		start := time.Now()
		response, err := client.Get(url)
		if err != nil {
			fmt.Println("error", time.Since(start).Milliseconds(), err)
			continue
		}
		page, _ := io.ReadAll(response.Body)
		response.Body.Close()
		fmt.Print(string(page))
	}
}
